"""What an imperfect searcher writes, in every role of `envs/search_qa.py`: the data of its tiny base model.

An episode is played first, then one of its turns is the completion and what came before it the prompt. Slips: a query
with the wrong relation or the wrong person, a result misread, an answer too early, a wrong verdict, a lost tag.
"""

import random
import re
from dataclasses import replace

from envs.retriever import RELATIONS
from envs.search_qa import KNOWN, Request, SearchQA, Turn, question_text, result_message, world

SHARES = {"answerer": 0.43, "privileged": 0.12, "router": 0.1, "searcher": 0.1, "responder": 0.1, "examiner": 0.15}
DONE = "The chain is long enough."  # the thought before a question
LOST_TAG, FOOLED = 0.05, 0.75  # chances: a tag is missing; a result without the fact that was needed is believed


def demonstration(task: SearchQA, generator: random.Random, slip: float = 0.35, early: float = 0.6):
    """One (chat messages, completion) of a role drawn from SHARES."""
    role = generator.choices(list(SHARES), list(SHARES.values()))[0]
    if role == "examiner":
        messages, completion = examiner_demonstration(task, generator)
    else:
        problem = task.sample(generator)
        privileged = task.qcp(problem) if role == "privileged" else ""
        slips = (0.03, 0.0) if privileged else (slip, early)  # who sees the path of the question hardly errs
        messages, completion = role_demonstration(task, problem, role, privileged, generator, *slips)
    if generator.random() < LOST_TAG:
        completion = completion.replace(generator.choice(re.findall("<[^>]+>", completion)), "", 1)
    return messages, completion


def role_demonstration(task, problem, role, privileged, generator, slip=0.35, early=0.6):
    """A turn of an agent that reads `privileged` and slips this often, as (chat messages, completion)."""
    turns = episode(task, problem, generator, slip, 0.0 if role in ("router", "searcher") else early)
    searches = tuple((turn.content, turn.result) for turn in turns[:-1])
    if role in ("answerer", "privileged"):
        played = generator.randrange(len(turns))
        messages = task.prompt(replace(problem, privileged=privileged))
        for turn in turns[:played]:
            messages += [{"role": "assistant", "content": turn.text}, result_message(turn.result)]
        return messages, turns[played].text
    if role == "responder":
        return task.prompt(problem, role, searches), turns[-1].text
    if role == "router":
        played = generator.randrange(len(turns))
        fact = world().sentence(*problem.path[-1][:2])
        enough = any(fact in result for _, result in searches[:played]) != (generator.random() < 0.2)
        relation = next((turn.thought for turn in turns[played:-1]), f"next: {problem.path[-1][1]}")
        verdict = f"<think>{KNOWN if enough else relation}</think><verify>{'yes' if enough else 'no'}</verify>"
        return task.prompt(problem, role, searches[:played]), verdict
    played = generator.randrange(len(searches))
    router = f"<think>{turns[played].thought}</think><verify>no</verify>"
    return task.prompt(problem, role, searches[:played], (("Router", router),)), turns[played].text


def episode(task: SearchQA, problem, generator: random.Random, slip: float, early: float) -> list[Turn]:
    """Searches along the chain of the question, then an answer: the turns of one agent.

    A result is searched for the fact that is needed. If it is not there, or missed, the searcher tries again or takes
    another fact for it. `early` is the chance to answer after each search while hops are left. It is above one half,
    so greedy decoding fails from two hops on, and has something to learn.
    """
    relations, turns = [relation for _, relation, _ in problem.path], []
    person, done = problem.path[0][0], 0
    while done < len(relations) and len(turns) < task.max_turns - 1 and not (turns and generator.random() < early):
        query = f"{relations[done]} of {person}"
        if generator.random() < slip:
            names = people(turns[-1].result if turns else problem.question)
            query = generator.choice(
                [turn.content for turn in turns[-1:]]
                + [f"{relations[done]} of {names[-1]}"]
                + 2 * [f"{generator.choice(RELATIONS)} of {person}"]
            )
        result = task.search([query])[0]
        turns.append(Turn(f"next: {relations[done]}", "search", query, result))
        read = world().sentence(person, relations[done]) in result and generator.random() > slip / 3
        if read or generator.random() < FOOLED:
            person = world().lookup(person, relations[done]) if read else generator.choice(people(result)[1::2])
            done += 1
    return [*turns, Turn(KNOWN, "answer", person)]


def examiner_demonstration(task: SearchQA, generator: random.Random):
    """A walk of as many searches as asked for, then the question about it and its answer; 15 % of them are wrong."""
    problem = task.sample(generator)  # never a held-out question
    relations, turns = [relation for _, relation, _ in problem.path], []
    for (query, result), relation in zip(task.path_steps(problem), relations):
        turns.append(Turn(f"next: {relation}", "search", query, result))
    person, answer = problem.path[0][0], problem.answers[0]
    messages = task.prompt(Request(world().sentence(person, generator.choice(RELATIONS)), problem.hops))
    if generator.random() < 0.15:  # the relations in a wrong order, or another person of the last result
        generator.shuffle(relations)
        answer = generator.choice(people(turns[-1].result))
    question = f"<question>{question_text(person, relations)}</question><answer>{answer}</answer>"
    texts = [*(turn.text for turn in turns), f"<think>{DONE}</think>{question}"]
    played = generator.randrange(len(texts))
    for turn in turns[:played]:
        messages += [{"role": "assistant", "content": turn.text}, result_message(turn.result)]
    return messages, texts[played]


def people(text: str) -> list[str]:
    """The two-word names in a text, in order."""
    return re.findall(r"[A-Z][a-z]+ [A-Z][a-z]+", text)
