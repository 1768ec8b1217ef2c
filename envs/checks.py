"""Tasks, teams and games of one's own, called once before a run: a mistake ends in one sentence.

An error inside the user's file keeps its traceback. Global random generators are left as they were.
"""

import contextlib
import faulthandler
import inspect
import math
import random
import sys
from numbers import Real
from types import SimpleNamespace

MOST_MOVES = 1000  # of a team or a game that is checked
PATIENCE = 60  # seconds


@contextlib.contextmanager
def same_randomness():
    """What is drawn inside from Python's, NumPy's or torch's global generator is put back.

    A check that hangs prints after a minute in which lines it waits, and waits on.
    """
    state = random.getstate()
    numpy, torch = (sys.modules.get(name) for name in ("numpy", "torch"))
    numpy_state = numpy and numpy.random.get_state()
    torch_state = torch and torch.random.get_rng_state()
    faulthandler.dump_traceback_later(PATIENCE, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)
        if torch:
            torch.random.set_rng_state(torch_state)


def need(title: str, thing, names: str, page: str) -> None:
    """Exit if a method or an attribute is missing."""
    missing = [name for name in names.split() if not hasattr(thing, name)]
    if missing:
        sys.exit(f"{title}: has no {', '.join(missing)}, see {page}")


def check_functions(task) -> None:
    functions = task.reward_functions
    if (
        not isinstance(functions, dict)
        or not functions
        or not all(map(callable, functions.values()))
    ):
        sys.exit(f"reward_functions: found {functions!r:.100}, expected a dictionary of functions")


def is_message(message) -> bool:
    """A dictionary with two texts, role and content."""
    values = [message.get("role"), message.get("content")] if isinstance(message, dict) else [None]
    return all(isinstance(value, str) for value in values)


def check_messages(method: str, messages) -> None:
    if not isinstance(messages, list) or not messages or not all(map(is_message, messages)):
        words = "expected a list of messages, each with a text as role and as content"
        sys.exit(f"{method}: returned {messages!r:.100}, {words}")


def first_problem(task, args):
    """The first evaluation problem."""
    problems = task.rows if args.eval_dataset else task.evaluation_problems(args.eval_problems)
    if not isinstance(problems, list | tuple):
        sys.exit(f"evaluation_problems: returned {problems!r:.100}, expected a list of problems")
    return problems[0] if problems else None


def check_agent_task(task, args, make_episode, ask, score) -> None:
    """prompt, step, right_answer, rewards, verdicts, for two episodes of a problem that end at once."""
    names = "train_problem prompt step" + " reward_functions" * (not args.reward)
    names += " rows" if args.eval_dataset else " evaluation_problems"
    gains = hasattr(args, "information_gain") and not hasattr(task, "turn_rewards")
    alpha = getattr(args, "critic_alpha", 0) if args.max_steps > 0 else 0
    judged = alpha > 0 and not (args.critic or args.critic_model)
    told = alpha > 0 and args.critic_model
    names += " right_answer" * bool(gains or told) + " verdicts" * judged
    need(f"--env {args.env}", task, names, "envs/README.md")
    can_be_called(task, "train_problem", "index seed")
    can_be_called(task, "step", "texts turn episodes")
    if not args.reward:
        check_functions(task)
    with same_randomness():
        problem = first_problem(task, args)
        if problem is None:
            return  # load_task says so
        check_messages("prompt", task.prompt(problem))
        answer = ("", "")
        if gains or told:
            answer = task.right_answer(problem)
            texts = isinstance(answer, list | tuple) and [isinstance(text, str) for text in answer]
            if texts != [True, True]:
                words = "expected two texts, what comes before the answer and the answer"
                sys.exit(f"right_answer: returned {answer!r:.100}, {words}")
        episodes = [make_episode(problem) for _ in range(2)]
        for episode, text in zip(episodes, ["".join(answer), ""]):
            episode.texts.append(text)
        replies = ask(task, episodes, 1, None, args)
        rewards = [(0.0,) * len(args.reward)] * 2 if args.reward else score(task, episodes, args)
        paid = hasattr(args, "information_gain") and hasattr(task, "turn_rewards")
        methods = ["verdicts"] * judged + ["turn_rewards"] * paid
        for episode, messages, values in zip(episodes, replies, rewards):
            episode.rewards = values
            if messages:
                texts = [message["content"] for message in messages]
                episode.texts += ["".join(texts), ""]
            for method in methods:
                check_turns(method, getattr(task, method), episode)


def can_be_called(task, name: str, parameters: str) -> None:
    """Exit unless a method takes these parameters, in this order where it has their names."""
    words = parameters.split()
    try:
        given = inspect.signature(getattr(task, name)).bind(*words).arguments  # parameter: word
        if any(parameter in words and parameter != word for parameter, word in given.items()):
            raise TypeError(f"its parameters are {', '.join(given)}")
    except TypeError as error:
        sys.exit(f"{name}: cannot be called as {name}({', '.join(words)}), {error}")


def check_turns(name: str, method, episode) -> None:
    """A number for each text that was read. Verdicts that are batched get and give lists."""
    if name == "verdicts" and getattr(method, "batched", False):
        lists = method([episode.problem], [episode])
        if not isinstance(lists, list | tuple) or len(lists) != 1:
            sys.exit(f"{name}: returned {lists!r:.100} for one episode, expected a list of one list")
        numbers = lists[0]
    else:
        numbers = method(episode.problem, episode)
    expected = len(episode.texts) // 2
    has_order = hasattr(numbers, "__iter__") and not isinstance(numbers, dict | set)
    numbers = list(numbers) if has_order else numbers
    if not isinstance(numbers, list) or len(numbers) != expected:
        each = "search" if name == "verdicts" else "turn but the last"
        words = f"expected a list of {expected} numbers, one for each {each}"
        sys.exit(f"{name}: returned {numbers!r:.100} for {episode.texts!r:.200}, {words}")


def check_examiner_task(task, args, make_episode, ask, score) -> None:
    """For pi_play.py: an empty text as an examiner's question and as an answer to a problem."""
    names = "request examined with_privilege traced_problems prompt step reward_functions"
    names += " rows" if args.eval_dataset else " evaluation_problems"
    if args.max_steps == 0:
        return  # an evaluation asks for less
    need(f"--env {args.env}", task, names, "envs/README.md")
    check_functions(task)
    with same_randomness():
        request, problem = task.request(random.Random(0)), first_problem(task, args)
        need("request: what it returned", request, "hops", "envs/README.md")
        for asked in (request, problem) if problem is not None else (request,):
            check_messages("prompt", task.prompt(asked))
            episode = make_episode(asked)
            episode.texts.append("")
            ask(task, [episode], 1, None, args)
        found = task.examined(request, [""])
        pair = isinstance(found, list | tuple) and len(found) == 2
        if not pair or not isinstance(found[0], Real):
            sys.exit(f"examined: returned {found!r:.100}, expected a format score and a question or None")
        traced = task.traced_problems(1)
        if not isinstance(traced, list | tuple):
            sys.exit(f"traced_problems: returned {traced!r:.100}, expected a list of problems")
        for one in traced:
            shown = task.with_privilege(one, args.privileged_context, "0")
            check_messages("prompt of with_privilege", task.prompt(shown))
        if problem is not None:
            score(task, [(problem, "")], args)


def check_team(team, args, score) -> None:
    """One episode in which every agent writes nothing."""
    need(f"--env {args.env}", team, "agents task start prompt advance", "envs/teams.py")
    names = team.agents
    listed = isinstance(names, list | tuple) and names
    if not listed or not all(isinstance(name, str) for name in names):
        words = "expected a tuple of texts; of one agent it is ('writer',)"
        sys.exit(f"--env {args.env}: its agents are {names!r:.100}, {words}")
    names = "train_problem" + " reward_functions" * (not args.reward)
    names += " train_rows evaluation_rows" if args.eval_dataset else " evaluation_problems"
    need(f"--env {args.env}: its task", team.task, names, "envs/teams.py")
    if not args.reward:
        check_functions(team.task)
    with same_randomness():
        rows = SimpleNamespace(rows=getattr(team.task, "evaluation_rows", None))
        problem = first_problem(rows if args.eval_dataset else team.task, args)
        if problem is None:
            return  # load_task says so
        episode = team.start(problem)
        if isinstance(episode, dict):
            sys.exit("start: returned a dictionary, expected an Episode of envs/teams.py")
        need(
            "start: its episode",
            episode,
            "agent answer completions cut rewards seed",
            "envs/teams.py",
        )
        for _ in range(MOST_MOVES):
            if episode.agent not in team.agents:
                method = "advance" if episode.completions else "start"
                found = f"{episode.agent!r} as episode.agent"
                sys.exit(
                    f"{method}: set {found}, expected one of {', '.join(team.agents)}, or None"
                )
            check_messages("prompt", team.prompt(episode))
            valid = team.advance([episode], [""])
            if not hasattr(valid, "__len__") or len(valid) != 1:
                words = "for one text, expected a list of one truth value"
                sys.exit(f"advance: returned {valid!r:.100} {words}")
            episode.completions.append("")
            if episode.agent is None:
                break
        else:
            words = "set episode.agent to None at its end"
            sys.exit(f"advance: the team still writes after {MOST_MOVES} turns; {words}")
        if not isinstance(episode.answer, str):
            sys.exit(f"advance: set {episode.answer!r:.100} as episode.answer, expected a text")
        if not args.reward:
            score(team.task, [(problem, episode.answer)], args)


def made(name: str, kind, options: dict):
    """A game of one's own; an error inside its constructor keeps its traceback."""
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        sys.exit(f"--game-options: {name} {error}")
    return kind(**options)


def check_game(name: str, kind, options: dict, by_chance: bool) -> None:
    """One game with legal moves, as far as the game names some. by_chance: random players need them."""
    with same_randomness():
        game = made(name, kind, options)
        generator = random.Random(0)
        base = [kind for kind in type(game).__mro__ if kind.__name__ == "Game"]
        names = "start observation play" if base else "reset"
        need(f"--games {name}", game, f"{names} legal_actions step prompt", "envs/game.py")
        if not hasattr(game, "handicap"):
            advice = "call super().__init__(**options)" if base else "see envs/game.py"
            sys.exit(f"--games {name}: its __init__ sets no handicap; {advice}")
        game.reset(generator)
        need(f"--games {name}", game, "player turns done rewards reason", "envs/game.py")
        for _ in range(MOST_MOVES):
            check_messages("prompt", game.prompt(game.player))
            actions = game.legal_actions()
            if not isinstance(actions, list | tuple) or not all(
                isinstance(a, str) for a in actions
            ):
                sys.exit(f"legal_actions: returned {actions!r:.100}, expected a list of texts")
            if not actions and by_chance:
                sys.exit("legal_actions: returned none, see --opponent and --eval-opponents")
            if not actions:
                return
            action = generator.choice(actions)
            game.step(f"\\boxed{{{action}}}")
            if game.reason in ("forfeit", "rejected"):
                words = "expected actions that play carries out, in square brackets as '[4]'"
                sys.exit(f"legal_actions: lists {action!r}, which is {game.reason}, {words}")
            if game.done:
                break
        else:
            sys.exit(f"step: the game is not done after {MOST_MOVES} moves")
        rewards = game.rewards
        numbers = [isinstance(reward, Real) and math.isfinite(reward) for reward in rewards]
        if numbers != [True, True]:
            sys.exit(f"rewards: found {rewards!r:.100} at the end of a game, expected two numbers")
        game = kind(**options)
        game.reset(generator)
        if base and type(game).parse is base[0].parse and game.play("") is True:
            print(f'--games {name}: play accepts "", so an empty text is a legal move')


def check_board(name: str, make) -> None:
    """One game of both players with the first and then the last legal orders, as dipllm.py plays."""
    with same_randomness():
        board = make()
        need(f"--env {name}", board, "reset legal_orders prompt after play", "envs/blotto.py")
        board.reset(random.Random(0))
        need(f"--env {name}", board, "done", "envs/blotto.py")
        if board.done:  # also a method
            words = "expected False, as an attribute or a property"
            sys.exit(f"done: found {board.done!r:.100} after reset, {words}")
        for turn in range(MOST_MOVES):
            orders = []
            for player in (0, 1):
                legal = board.legal_orders(player)
                check_orders(legal)
                if not legal and turn == player == 0:
                    sys.exit("legal_orders: player 0 has no units after reset, and needs some")
                given = ()
                for texts in legal:
                    check_messages("prompt", board.prompt(player, given))
                    given += (texts[-(turn % 2)],)
                orders.append(given)
            before = shown(board)
            centres = board.after(tuple(orders))
            numbers = hasattr(centres, "__len__") and [
                isinstance(count, Real) and 0 <= count < math.inf for count in centres
            ]
            if numbers != [True, True]:
                words = "expected two counts of centres, each 0 or more"
                sys.exit(f"after: returned {centres!r:.100}, {words}")
            if shown(board) != before:
                sys.exit("after: changed the board, which only play may do")
            board.play(tuple(orders))
            if board.done:
                return
        sys.exit(f"play: the game is not done after {MOST_MOVES} turns")


def shown(board) -> str:
    """What both players may order, and are asked for their first units."""
    found = []
    for player in (0, 1):
        legal = board.legal_orders(player)
        found += [legal, board.prompt(player, ()) if legal else None]
    return repr(found)


def check_orders(legal) -> None:
    """For each unit, of which a player may have lost all, a list of different texts."""
    units = isinstance(legal, list | tuple) and [
        isinstance(texts, list | tuple)
        and len(texts) > 0
        and all(isinstance(text, str) and text for text in texts)
        and len(set(texts)) == len(texts)
        for texts in legal
    ]
    if units is False or not all(units):
        words = "expected for each unit a list of different texts"
        sys.exit(f"legal_orders: returned {legal!r:.100}, {words}")


def check_dilemma(name: str, kind, options: dict) -> None:
    """One game for two with a reward a round (envs/dilemma.py), with legal actions by chance."""
    names = "rounds scale start movers prompt legal_actions parse play rewards opponents"
    with same_randomness():
        game = made(name, kind, options)
        need(f"--games {name}", game, names, "envs/dilemma.py")
        if not isinstance(game.scale, Real) or not 0 < game.scale < math.inf:
            sys.exit(f"scale: found {game.scale!r:.100}, expected a number above 0")
        opponents = game.opponents()
        if not isinstance(opponents, dict) or not all(map(callable, opponents.values())):
            sys.exit(f"opponents: returned {opponents!r:.100}, expected a dictionary of functions")
        if {"self", "policy"} & opponents.keys():
            sys.exit("opponents: self and policy mean the policy; give that player another name")
        generator = random.Random(0)
        state = game.start(generator)
        if not isinstance(game.rounds, int) or game.rounds < 1:
            sys.exit(f"rounds: found {game.rounds!r:.100}, expected a whole number from 1")
        for _ in range(game.rounds):
            chosen = ["", ""]
            movers = game.movers(state)
            if not isinstance(movers, list | tuple) or not movers or not {0, 1} >= set(movers):
                sys.exit(f"movers: returned {movers!r:.100}, expected (0, 1), (0,) or (1,)")
            for player in movers:
                check_messages("prompt", game.prompt(state, player))
                actions = game.legal_actions(state, player)
                listed = isinstance(actions, list | tuple) and actions
                if not listed or not all(isinstance(action, str) for action in actions):
                    words = f"expected a list of texts in each of its {game.rounds} rounds"
                    sys.exit(f"legal_actions: returned {actions!r:.100}, {words}")
                chosen[player] = generator.choice(actions)
                if game.parse(state, player, f"\\boxed{{{chosen[player]}}}") is None:
                    words = "which parse does not read; actions stand in square brackets as '[4]'"
                    sys.exit(f"legal_actions: lists {chosen[player]!r}, {words}")
                for opponent, choose in opponents.items():
                    action = choose(state, player, random.Random(0))
                    if action not in (*actions, game.parse(state, player, f"\\boxed{{{action}}}")):
                        words = f"expected what parse returns, or one of {actions!r:.100}"
                        sys.exit(f"opponents: {opponent} plays {action!r:.100}, {words}")
            state = game.play(state, chosen)
            if state is None:
                sys.exit("play: returned None, expected the new state")
            rewards = game.rewards(state)
            pair = rewards if isinstance(rewards, list | tuple) else [rewards]
            numbers = [isinstance(reward, Real) and math.isfinite(reward) for reward in pair]
            if numbers != [True, True]:
                words = "expected two numbers in a list, player 0's and player 1's"
                sys.exit(f"rewards: returned {rewards!r:.100} after a round, {words}")
