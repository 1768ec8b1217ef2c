"""The two teams: who writes when and sees what, against traces of the official orchestras; verdicts, validity, ends."""

import json
from pathlib import Path

import pytest

from envs.countdown import Countdown
from envs.countdown import Problem as NumberProblem
from envs.search_qa import Problem
from envs.teams import Episode, RouterSearcherResponder, SolverVerifier, verdict

REFERENCE = json.loads((Path(__file__).parent / "reference" / "dr_mas.json").read_text())
AGENTS = {"Solver Agent": "solver", "Verifier Agent": "verifier"}
SEARCH_AGENTS = {"Verifier Agent": "router", "Search Agent": "searcher", "Answer Agent": "responder"}
NUMBERS = NumberProblem((2, 3, 4), 24)
QUESTION = Problem("Who is the friend of Ana Bel?", ("Cid Dor",))
RIGHT, WRONG = "<answer>2*3*4</answer>", "<answer>2+3+4</answer>"
APPROVE, REJECT = "<verdict>approve</verdict>", "<verdict>reject</verdict>"
YES, NO = "<think>x</think><verify>yes</verify>", "<think>x</think><verify>no</verify>"
QUERY, ANSWER = "<think>x</think><search>q</search>", "<think>x</think><answer>Cid Dor</answer>"


class Recorder:
    """A task that notes what it is asked, with one result for every query."""

    def __init__(self):
        self.prompts, self.batches = [], []
        self.reward_functions = {"exact": lambda problem, answer: float(answer == problem)}

    def prompt(self, problem, role="", history=(), teammates=()):
        self.prompts.append((role, tuple(history), tuple(teammates)))
        return [{"role": "user", "content": f"{problem}\nmore"}]

    def search(self, queries):
        self.batches.append(queries)
        return [f"found {query}" for query in queries]


def drive(team, episode, *texts) -> list[bool]:
    """Let the agents of one episode write these texts; which of them were valid."""
    return [valid for text in texts for valid in team.advance([episode], [text])]


@pytest.mark.parametrize("trace", REFERENCE["math_orchestration_traces"]["traces"], ids=lambda t: t["max_loop_num"])
def test_reference_solver_and_verifier(trace):
    """Every call of the official orchestra: which of three items it concerns, how many outputs of teammates it sees,
    and the final solutions. Verdicts are translated to our tag. An agent's k-th call writes an item's k-th text."""
    team = SolverVerifier(Recorder(), trace["max_loop_num"])
    texts = {agent: trace[f"{agent}_outputs_by_call"] for agent in team.agents}
    episodes, counts = [team.start(item) for item in range(3)], dict.fromkeys(team.agents, 0)
    for call in trace["calls"]:
        agent = AGENTS[call["agent"]]
        due = [item for item, episode in enumerate(episodes) if episode.agent == agent]
        assert due == [item for item, active in enumerate(call["active"]) if active]
        for item in due:
            team.prompt(episodes[item])
            assert len(team.task.prompts[-1][2]) == call["sees_team_context"][item]
        written = [texts[agent][item][counts[agent]].replace("verify>", "verdict>") for item in due]
        team.advance([episodes[item] for item in due], written)
        counts[agent] += 1
    assert all(episode.agent is None for episode in episodes)
    assert [episode.answer for episode in episodes] == trace["final_action"]


def test_reference_router_searcher_and_responder():
    """The official orchestra runs one environment step a call, and the trace keeps all items in play at every step,
    whatever they did before; so here every step begins with fresh episodes of that round. Compared: who is called on
    which item, what the searcher sees of its teammates, and the action. Not compared: the count beside the Answer
    Agent, whose prompt holds no teammate's text, and the item that is inactive from the start."""
    trace = REFERENCE["search_orchestration_trace"]["trace"]
    items = [i for i, active in enumerate(trace["active"]) if active]
    for step in trace["per_step"]:
        team = RouterSearcherResponder(Recorder(), trace["max_steps"])
        episodes = {i: Episode(i, "router", round=step["step"]) for i in items}
        for call in step["calls"]:
            agent = SEARCH_AGENTS[call["agent"]]
            due = [i for i in items if episodes[i].agent == agent]
            assert due == [i for i, active in enumerate(call["active"]) if active], (step["step"], agent)
            for i in due:
                team.prompt(episodes[i])
                seen = len(team.task.prompts[-1][2])
                assert seen == (0 if agent == "responder" else call["sees_team_context"][i])
            texts = {"searcher": QUERY, "responder": "<think>x</think><answer>x</answer>"}
            team.advance([episodes[i] for i in due], [texts.get(agent, trace["verdicts"][i]) for i in due])
        actions = ["" if episodes[i].calls[-1][0] == "router" else episodes[i].calls[-1][1] for i in items]
        assert actions == [step["actions"][i] for i in items]
        over = [episodes[i].agent is None for i in items]
        assert over == [step["step"] == trace["max_steps"] or bool(episodes[i].answer) for i in items]


def test_reference_math_approval():
    case = REFERENCE["math_approval"]
    approved = [
        not active or verdict(text, "approve", "reject", "verify", missing=True)
        for text, active in zip(case["in"], case["active"])
    ]
    assert approved == list(map(bool, case["approved_after_from_all_false"]))


@pytest.mark.parametrize("case", REFERENCE["search_routing"]["in"])
def test_reference_search_routing(case):
    given = REFERENCE["search_routing"]
    team = RouterSearcherResponder(Recorder())
    episode = team.start(QUESTION)
    drive(team, episode, case)
    assert (episode.agent == "responder") == given["sufficient"][given["in"].index(case)]


@pytest.fixture
def pair() -> SolverVerifier:
    return SolverVerifier(Countdown())


VERDICTS = [  # what the verifier writes, whether that is valid, who is next if a missing verdict approves, or rejects
    ("it is right", False, None, "solver"),
    ("<verdict> approve </verdict>", True, None, "solver"),  # no verdict, with its spaces
    (REJECT, True, "solver", "solver"),
    (REJECT + APPROVE, True, None, None),  # an approval wins over a rejection beside it
]


@pytest.mark.parametrize("text, valid, approve, reject", VERDICTS)
def test_verdicts(text, valid, approve, reject):
    for missing, agent in (("approve", approve), ("reject", reject)):
        team = SolverVerifier(Countdown(), missing_verdict=missing)
        episode = team.start(NUMBERS)
        assert drive(team, episode, RIGHT, text) == [True, valid]
        assert episode.agent == agent


@pytest.mark.parametrize("text, valid", [("<answer></answer>", True), ("2*3*4", False), ("<answer>2*3*4", False)])
def test_validity_of_a_solution(pair, text, valid):
    assert drive(pair, pair.start(NUMBERS), text) == [valid]


@pytest.fixture
def trio() -> RouterSearcherResponder:
    return RouterSearcherResponder(Recorder())


def test_what_each_of_the_three_sees(trio):
    """All see the history, which grows; the searcher also what the router has just said."""
    episode = trio.start(QUESTION)
    for text in (NO, QUERY, NO, QUERY.replace("q", "r"), YES, ANSWER):
        trio.prompt(episode)
        assert drive(trio, episode, text) == [True]
    one, two = (("q", "found q"),), (("q", "found q"), ("r", "found r"))
    routed = (("Router", NO),)
    expected = [("router", (), ()), ("searcher", (), routed), ("router", one, ()), ("searcher", one, routed)]
    assert trio.task.prompts == expected + [("router", two, ()), ("responder", two, ())]
    assert episode.agent is None and episode.answer == "<answer>Cid Dor</answer>"
    assert [agent for agent, _ in episode.calls] == [agent for agent, _, _ in trio.task.prompts]


def test_searches_of_a_round_are_one_batch(trio):
    episodes = [trio.start(i) for i in range(4)]
    trio.advance(episodes, [NO, YES, NO, NO])
    due = [episodes[i] for i in (0, 2, 3)]
    assert trio.advance(due, [QUERY, "no tag", QUERY.replace(">q<", "> r <")]) == [True, False, True]
    assert trio.task.batches == [["q", "r"]]
    assert [episode.history for episode in episodes] == [(("q", "found q"),), (), (), (("r", "found r"),)]
    assert [episode.agent for episode in episodes] == ["router", "responder", "router", "router"]


def test_an_answer_without_its_tag_is_no_answer(trio):
    episode = trio.start(QUESTION)
    assert drive(trio, episode, YES, "Cid Dor", YES, ANSWER) == [True, False, True, True]
    assert episode.answer == "<answer>Cid Dor</answer>" and episode.round == 3
    episode = RouterSearcherResponder(Recorder(), 1).start(QUESTION)
    drive(RouterSearcherResponder(Recorder(), 1), episode, YES, "Cid Dor")
    assert episode.agent is None and episode.answer == "", "at the last step that was the last chance"


ROUTES = [  # what the router writes, whether that is valid, who is next if a missing verdict approves, or rejects
    (YES, True, "responder", "responder"),
    ("<verify>yes</verify>", False, "responder", "responder"),
    (YES + "\u4e2d", False, "responder", "responder"),
    ("enough", False, "responder", "searcher"),
    ("<think>x</think><verify>maybe</verify>", True, "responder", "searcher"),
    ("<think>x</think><verify> No </verify>", True, "searcher", "searcher"),  # in any case, and with spaces
]


@pytest.mark.parametrize("text, valid, approve, reject", ROUTES)
def test_routes(text, valid, approve, reject):
    for missing, agent in (("approve", approve), ("reject", reject)):
        team = RouterSearcherResponder(Recorder(), missing_verdict=missing)
        episode = team.start(QUESTION)
        assert drive(team, episode, text) == [valid]
        assert episode.agent == agent
        assert episode.calls == [("router", text.replace("> ", ">").replace(" <", "<"))]


def test_the_team_of_the_example():
    """Critic and refiner act only after a wrong answer; the refiner's is the one that counts."""
    pytest.importorskip("reasoning_gym")
    from envs.examples.retry import Retry

    team = Retry()
    problem = team.task.evaluation_problems(1)[0]
    right, wrong = [team.start(problem) for _ in range(2)]
    assert team.advance([right, wrong], [problem["answer"], "none"]) == [True, True]
    assert (right.agent, wrong.agent) == (None, "critic")
    team.advance([wrong], ["count again"])
    assert wrong.agent == "refiner"
    assert "count again" in team.prompt(wrong)[-1]["content"]
    team.advance([wrong], [problem["answer"]])
    assert wrong.agent is None
    assert team.task.correctness(problem, wrong.answer) == 1
