"""Graph games: exact capture times, scripted play, published numbers, and the rules against plain
games of loops."""

import itertools
import json
import math
from pathlib import Path

import networkx
import numpy as np
import pytest
import torch

from algorithms.arac import Graph, GraphGame, GraphPursuit, make_graph
from envs.graph_games import Confrontation, capture_tables, capture_times
from envs.graphs import gabriel_edges

VECTORS = json.loads((Path(__file__).parent / "reference" / "arac_graphs.json").read_text())
CASES = {case["case"]: case for case in VECTORS}
CAPTURES = CASES["adjacency_capture_dp"]
GRID = CASES["published_number_shortest_path_vs_asynchronous_dp_evader"]


def ids(row: dict) -> str:
    return "-".join(str(value) for value in list(row.values())[:3])


class GraphConfrontation(Confrontation, GraphGame):
    """As make_games() puts it together."""


class PlainGraph:
    """The same graph from its edges alone, by networkx."""

    def __init__(self, graph: Graph):
        plain = networkx.Graph(graph.edges.tolist())
        self.near = {node: sorted({node, *plain[node]}) for node in plain}
        self.hops = dict(networkx.all_pairs_shortest_path_length(plain))

    def captured(self, pursuers, evader: int, num_captors: int) -> bool:
        return sum(self.hops[p][evader] <= 1 for p in pursuers) >= num_captors

    def joint(self, pursuers) -> list[tuple]:
        return list(itertools.product(*(self.near[p] for p in pursuers)))

    def evader(self, kind: str, asynchronous: bool, pursuers, moved, evader: int, times) -> int:
        """Node that the evader goes to; the first of several."""
        if kind == "stay":
            return evader
        seen = moved if asynchronous else pursuers
        if kind == "maxdist":
            scores = [min(self.hops[p][e] for p in seen) for e in self.near[evader]]
        elif asynchronous:
            scores = [times[(*moved, e)] for e in self.near[evader]]
        else:
            scores = [min(times[(*p, e)] for p in self.joint(pursuers)) for e in self.near[evader]]
        return self.near[evader][scores.index(max(scores))]

    def duel(self, positions: list[int], k: int) -> tuple[list[int], int, bool]:
        """Who is left of two teams of k after a move, the reward, and whether somebody has won."""
        left = []
        for number, node in enumerate(positions):
            balance = 0
            for other, place in enumerate(positions):
                if node >= 0 and place >= 0 and self.hops[node][place] <= 1:
                    balance += 1 if (other < k) == (number < k) else -1
            left.append(node if node >= 0 and balance >= 0 else -1)
        first, second = (any(node >= 0 for node in part) for part in (left[:k], left[k:]))
        return left, first - second, not (first and second)


def play(game, kind: str, starts: torch.Tensor, steps: int = 128) -> tuple[float, float]:
    """Success rate and mean steps of successes of scripted pursuers, each game until it ends."""
    game.reset(len(starts), 0)
    game.positions = starts
    lengths, running = torch.zeros(len(starts)), torch.ones(len(starts), dtype=torch.bool)
    for step in range(1, steps + 1):
        _, terminated, _, _ = game.step(game.scripted(kind, game.positions))
        lengths[running & terminated] = step
        running &= ~terminated
        if not running.any():
            break
    captured = lengths > 0
    return captured.double().mean().item(), lengths[captured].double().mean().item()


SIZES = [  # name, nodes, edges, K, diameter
    ("cycle_8", 8, 8, 3, 4),
    ("path_5", 5, 4, 3, 4),
    ("grid_6x6", 36, 60, 5, 10),
    ("grid_2x3", 6, 7, 4, 3),
    ("complete_4", 4, 6, 4, 1),
    ("petersen", 10, 15, 4, 2),
]


@pytest.mark.parametrize("name, nodes, edges, slots, diameter", SIZES)
def test_tables(name, nodes, edges, slots, diameter):
    """Slots in increasing order, padded ones stay; hops; and the row of removed players."""
    assert make_graph(name).num_slots == slots
    K = slots + 2
    graph = make_graph(name, K)
    plain = PlainGraph(graph)
    assert (graph.num_nodes, len(graph.edges), graph.diameter) == (nodes, edges, diameter)
    for node, near in plain.near.items():
        assert graph.slots[node].tolist() == near + [node] * (K - len(near))
        assert graph.slot_mask[node].tolist() == [False] * len(near) + [True] * (K - len(near))
        assert graph.log_slots[node].item() == pytest.approx(math.log(len(near)))
        hops = [plain.hops[node][other] for other in range(nodes)]
        assert graph.distances[node].tolist() == hops + [2 * diameter]
    assert graph.slots[-1].tolist() == [-1] * K and graph.log_slots[-1] == 0
    assert graph.slot_mask[-1].tolist() == [False] + [True] * (K - 1)
    assert (graph.distances[-1] == 2 * diameter).all()


def test_gabriel_edges_by_definition():
    """No third point in the circle around the middle of an edge."""
    points = torch.rand(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    squares = (points[:, None] - points).square().sum(-1)  # (n,n)
    third = (squares[:, None] + squares).amin(2)  # (n,n) of i to k and on to j, the least over k
    expected = (third >= squares).triu(1).nonzero()
    assert sorted(gabriel_edges(points).tolist()) == expected.tolist()


def test_graphml(tmp_path):
    """Directions, double edges and loops do not matter; the largest component is kept, in order."""
    graph = networkx.MultiDiGraph()
    names = ["lone", "d", "c", "b", "a"]
    graph.add_nodes_from((name, {"x": float(i), "y": 2.0 * i}) for i, name in enumerate(names))
    graph.add_edges_from([("a", "b"), ("b", "a"), ("c", "b"), ("c", "d"), ("d", "d")])
    path = str(tmp_path / "town.graphml")
    networkx.write_graphml(graph, path)
    found = make_graph(path, 4)
    assert found.name == "town" and found.num_slots == 4
    assert PlainGraph(found).near == {0: [0, 1], 1: [0, 1, 2], 2: [1, 2, 3], 3: [2, 3]}
    assert found.coordinates.tolist() == [[1, -2], [2, -4], [3, -6], [4, -8]], "y upwards, as on a map"
    (tmp_path / "broken.graphml").write_text("no XML")
    with pytest.raises(ValueError, match="not a GraphML file"):
        make_graph(str(tmp_path / "broken.graphml"), 5)


@pytest.mark.parametrize("row", CASES["classic_cops_and_robbers"]["results"], ids=ids)
def test_reference_cops_and_robbers(row):
    times = capture_times(make_graph(row["graph"]), row["pursuers"], on_node=True)
    best = times.flatten(0, -2).amax(1).min().item()  # pursuers choose nodes, then the evader does
    assert best == (math.inf if row["capture_time"] is None else row["capture_time"])


@pytest.mark.parametrize("row", CAPTURES["results"], ids=ids)
def test_reference_capture_times(row):
    captors = row["adjacent_pursuers_needed"]
    times = capture_times(make_graph(row["graph"]), row["pursuers"], captors)
    finite = times[times < math.inf]
    share = row["fraction_of_states_with_forced_capture"]
    assert len(finite) / times.numel() == pytest.approx(share, abs=1e-6)
    assert finite.max() == row["max_forced_capture_steps"]
    best = times.flatten(0, -2).amax(1).min().item()
    wanted = row["best_start_worst_case"]
    assert best == (math.inf if wanted is None else wanted)


@pytest.mark.parametrize("name, graph, node", [("cycle8", "cycle_8", 4), ("grid3x3", "grid_3x3", 8)])
def test_reference_capture_times_of_states(name, graph, node):
    times = capture_times(make_graph(graph), 2)
    for second in (0, node):
        assert times[0, second].tolist() == CAPTURES[f"D_{name}_p1_0_p2_{second}"]


@pytest.mark.parametrize("row", CASES["reference_policy_success"]["results"], ids=ids)
def test_reference_policies(row):
    """Every start of the games' own lists, played to its end."""
    graph = make_graph(row["graph"].replace("cycle", "cycle_").replace("grid", "grid_"))
    for start, rule in (("all", "independent"), ("same", "same")):
        game = GraphPursuit(graph, "cpu", evader=row["evader"], start=rule)
        assert len(game.starts) == row[f"n_starts_{start}"] == len(game.starts.unique(dim=0))
        for kind, name in (("shortest", "shortest_path"), ("dp", "dp")):
            rate, steps = play(game, kind, game.starts)
            assert rate == pytest.approx(row[f"{name}_{start}"][0], abs=1e-9)
            assert rate == 0 or steps == pytest.approx(row[f"{name}_{start}"][1], abs=1e-9)


def test_reference_published_grid():
    """R2PS, table 1: shortest paths never catch the asynchronous DP evader of a 10x10 grid; ours
    do once in 500."""
    graph, extra = make_graph("grid_10x10"), GRID["grid_10x10_extra"]
    times, random, starts = capture_tables(graph, 2, 1)[0], np.random.RandomState(0), []
    assert torch.bincount(times.flatten().long()).tolist() == extra["histogram_of_D"]
    while len(starts) < 500:
        p, q, e = (random.randint(100) for _ in range(3))
        if min(graph.distances[p, e], graph.distances[q, e]) > 2:
            starts.append([p, q, e])
    starts = torch.tensor(starts)
    game = GraphPursuit(graph, "cpu", evader="dp", asynchronous=True)
    expected = GRID["reproduced_pursuer_tie_evader_tie"]["Grid"]["first,first"]
    assert play(game, "shortest", starts)[0] == expected == 0.002
    rate, steps = play(game, "dp", starts)
    assert rate == extra["dp_pursuer_success"]
    assert steps == pytest.approx(times[tuple(starts.T)].double().mean().item()), "exactly D steps"
    game = GraphPursuit(graph, "cpu", evader="dp")
    assert play(game, "shortest", starts)[0] == 1.0, "the synchronous evader is caught"


SETTINGS = [("cycle_8", 2, 1), ("grid_3x3", 2, 2), ("city_9", 3, 2), ("path_5", 1, 1)]


def follow(game, plain, wanted, steps: int, reset) -> tuple[int, int]:
    """Games with random slots, step by step beside wanted(positions, slots) -> (last, reward, end).

    Returns how many ended and how many were cut off. `reset` checks the positions of a new game.
    """
    random, clocks, ends, cuts = np.random.RandomState(1), [0] * len(game.positions), 0, 0
    for _ in range(steps):
        before = game.positions.tolist()
        slots = [[random.randint(len(plain.near[p])) if p >= 0 else 0 for p in row] for row in before]
        mine, theirs = torch.tensor(slots).split(game.teams, 1)
        learned = getattr(game, "evader", "learned") == "learned"
        found = game.step(mine, theirs if learned else None)
        for number, (row, chosen) in enumerate(zip(before, slots)):
            last, reward, ended = wanted(row, chosen)
            clocks[number] += 1
            cut = clocks[number] == game.horizon and not ended
            assert found[3][number].tolist() == last
            assert [float(values[number]) for values in found[:3]] == [reward, ended, cut]
            now = game.positions[number].tolist()
            if ended or cut:
                clocks[number] = 0
                assert reset(now)
            else:
                assert now == last
            ends, cuts = ends + ended, cuts + cut
        assert game.steps.tolist() == clocks
    return ends, cuts


EVADERS = ["dp", "maxdist", "stay", "learned", "dp asynchronous", "maxdist asynchronous"]


@pytest.mark.parametrize("evader", EVADERS)
@pytest.mark.parametrize("name, m, captors", SETTINGS)
def test_pursuit_is_that_of_a_plain_game(name, m, captors, evader):
    evader, _, asynchronous = evader.partition(" ")
    graph = make_graph(name, 6)
    plain, times = PlainGraph(graph), capture_times(graph, m, captors)
    options = {"num_pursuers": m, "num_captors": captors, "start": "independent", "horizon": 5}
    game = GraphPursuit(graph, "cpu", evader=evader, asynchronous=bool(asynchronous), **options)
    game.reset(6, 3)

    def wanted(row, slots):
        moved = [plain.near[p][slot] for p, slot in zip(row, slots)]
        if evader != "learned":
            moved[-1] = plain.evader(evader, asynchronous, row[:-1], moved[:-1], row[-1], times)
        caught = plain.captured(moved[:-1], moved[-1], captors)
        return moved, caught, caught

    ends, cuts = follow(game, plain, wanted, 30, lambda p: not plain.captured(p[:-1], p[-1], captors))
    assert ends + cuts > 10


@pytest.mark.parametrize("name, k", [("cycle_8", 2), ("grid_4x4", 3)])
def test_confrontation_is_that_of_a_plain_game(name, k):
    game = GraphConfrontation(make_graph(name, 9), "cpu", team_size=k, horizon=12)
    game.reset(8, 0)
    plain = PlainGraph(game.graph)

    def wanted(row, slots):
        return plain.duel([plain.near[p][s] if p >= 0 else -1 for p, s in zip(row, slots)], k)

    ends, cuts = follow(game, plain, wanted, 80, lambda p: min(p) >= 0 and len({*p}) == 2 * k)
    assert ends > 5


@pytest.mark.parametrize("side", [0, 1])
def test_scripts_of_both_teams_are_those_of_a_plain_game(side):
    game = GraphConfrontation(make_graph("city_20", 9), "cpu", team_size=3)
    plain = PlainGraph(game.graph)
    states = torch.randint(-1, 20, (200, 6), generator=torch.Generator().manual_seed(0))
    states = states[(states[:, :3] >= 0).any(1) & (states[:, 3:] >= 0).any(1)]
    for row, slots in zip(states.tolist(), game.scripted("shortest", states, side).tolist()):
        own, others = (row[:3], row[3:]) if side == 0 else (row[3:], row[:3])
        for node, slot in zip(own, slots):
            near = plain.near[node] if node >= 0 else [0]
            gaps = [min(plain.hops[place][other] for other in others if other >= 0) for place in near]
            assert slot == gaps.index(min(gaps)), "the nearest of those that are left"


STARTS = [("city_60", "same", 2), ("city_60", "far", 2), ("city_60", "independent", 5)]
STARTS += [("cycle_1200", "same", 2), ("cycle_1200", "independent", 2)]


@pytest.mark.parametrize("name, start, m", STARTS)
def test_starts(name, start, m):
    """Listed or drawn: nobody is captured, the same every time; far is more than 5 hops."""
    game, again = (GraphPursuit(make_graph(name), "cpu", num_pursuers=m, start=start) for _ in "12")
    hops = game.graph.distances[game.starts[:, :-1], game.starts[:, -1:]]
    assert hops.min() == (6 if start == "far" else 2)
    assert torch.equal(game.starts, again.starts) and len(game.starts) > 1600
    if start != "independent":
        assert (game.starts[:, :-1] == game.starts[:, :1]).all()
    counts = torch.bincount(game.starts[:, 0], minlength=game.graph.num_nodes)
    assert (counts > 0).double().mean() > 0.99, "every node is somebody's start"


def test_an_own_rule_says_where_games_begin():
    """An evader who is caught on its own node only: one that is next to the pursuers is free."""

    class SameNode(GraphPursuit):
        def outcome(self, positions):
            caught = (positions[:, :-1] == positions[:, -1:]).any(1)
            return caught.float(), caught

    assert sorted(SameNode(make_graph("path_2"), "cpu").starts.tolist()) == [[0, 0, 1], [1, 1, 0]]
    with pytest.raises(ValueError, match="path_2: no start at which the evader is not captured fits --start same"):
        GraphPursuit(make_graph("path_2"), "cpu")
