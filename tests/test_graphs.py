"""Graph games: exact capture times, scripted play, published numbers, and every rule against plain games of loops."""

import functools
import itertools
import json
import math
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch

from envs.graph_games import GraphConfrontation, GraphGame, GraphPursuit
from envs.graphs import Graph, capture_tables, capture_times, make_graph

VECTORS = json.loads((Path(__file__).parent / "reference" / "arac_graphs.json").read_text())
CASES = {case["case"]: case for case in VECTORS}
CAPTURES = CASES["adjacency_capture_dp"]
GRID = CASES["published_number_shortest_path_vs_asynchronous_dp_evader"]
SWEEP = CASES["fixed_divergence_weight_sweep_cycle8"]
graph_named = functools.cache(make_graph)  # graphs keep their tables of capture times


def ids(row: dict) -> str:
    return "-".join(str(value) for value in list(row.values())[:3])


# --- Plain games of dicts and loops ----------------------------------------------------------------------------------


class PlainGraph:
    def __init__(self, graph: Graph):
        open_edges = (~graph.edge_mask).tolist()
        self.near = {a: [b for b, is_open in enumerate(row) if is_open] for a, row in enumerate(open_edges)}
        self.hops = {(a, b): hops for a in self.near for b, hops in self.search(a).items()}

    def search(self, start: int) -> dict[int, int]:
        found, queue = {start: 0}, deque([start])
        while queue:
            node = queue.popleft()
            for other in self.near[node]:
                if other not in found:
                    found[other] = found[node] + 1
                    queue.append(other)
        return found

    def captured(self, pursuers, evader: int, num_captors: int) -> bool:
        return sum(self.hops[p, evader] <= 1 for p in pursuers) >= num_captors

    def joint(self, pursuers) -> list[tuple]:
        return list(itertools.product(*(self.near[p] for p in pursuers)))

    def capture_times(self, m: int, num_captors: int) -> dict:
        states = list(itertools.product(self.near, repeat=m + 1))
        times = {s: 0 if self.captured(s[:-1], s[-1], num_captors) else math.inf for s in states}
        for now in itertools.count(1):
            new = [
                s
                for s in states
                if times[s] == math.inf
                and any(all(times[*p, e] < now for e in self.near[s[-1]]) for p in self.joint(s[:-1]))
            ]
            if not new:
                return times
            times.update(dict.fromkeys(new, now))

    def evader(self, kind: str, asynchronous: bool, pursuers, moved, evader: int, times: dict) -> int:
        """Node that the evader goes to; the first of several."""
        if kind == "stay":
            return evader
        seen = moved if asynchronous else pursuers
        if kind == "maxdist":
            scores = [min(self.hops[p, e] for p in seen) for e in self.near[evader]]
        elif asynchronous:
            scores = [times[*moved, e] for e in self.near[evader]]
        else:
            scores = [min(times[*p, e] for p in self.joint(pursuers)) for e in self.near[evader]]
        return self.near[evader][scores.index(max(scores))]

    def duel(self, positions: list[int], k: int) -> tuple[list[int], int, bool]:
        """Who is left of two teams of k after a move, the reward, and whether somebody has won."""
        left = []
        for number, node in enumerate(positions):
            balance = 0
            for other, place in enumerate(positions):
                if node >= 0 and place >= 0 and self.hops[node, place] <= 1:
                    balance += 1 if (other < k) == (number < k) else -1
            left.append(node if node >= 0 and balance >= 0 else -1)
        first, second = any(node >= 0 for node in left[:k]), any(node >= 0 for node in left[k:])
        return left, first - second, not (first and second)


def play(game: GraphGame, kind: str, starts: torch.Tensor, steps: int = 128) -> tuple[float, float, float]:
    """Success rate, mean steps of successes and the mean reward of a scripted team 0, each game until it ends."""
    game.positions, game.steps = starts.clone(), torch.zeros(len(starts), dtype=torch.long)
    lengths, running = torch.zeros(len(starts)), torch.ones(len(starts), dtype=torch.bool)
    total = torch.zeros(len(starts))
    for step in range(1, steps + 1):
        rewards, terminated, truncated, _ = game.step(game.scripted(kind, game.positions))
        lengths[running & terminated] = step
        total += rewards * running
        running &= ~(terminated | truncated)
        if not running.any():
            break
    captured = lengths > 0
    return captured.double().mean().item(), lengths[captured].double().mean().item(), total.mean().item()


# --- Graphs ----------------------------------------------------------------------------------------------------------

SIZES = [  # name, nodes, edges, K, diameter
    ("cycle_3", 3, 3, 3, 1),
    ("cycle_8", 8, 8, 3, 4),
    ("path_2", 2, 1, 2, 1),
    ("path_5", 5, 4, 3, 4),
    ("grid_6x6", 36, 60, 5, 10),
    ("grid_2x3", 6, 7, 4, 3),
    ("grid_1x4", 4, 3, 3, 3),
    ("complete_4", 4, 6, 4, 1),
    ("petersen", 10, 15, 4, 2),
]


@pytest.mark.parametrize("name, nodes, edges, slots, diameter", SIZES)
def test_sizes(name, nodes, edges, slots, diameter):
    graph = make_graph(name)
    assert (graph.name, graph.num_nodes, graph.num_slots, graph.diameter) == (name, nodes, slots, diameter)
    assert (~graph.edge_mask).sum() == nodes + 2 * edges
    low, high = graph.coordinates.amin(0), graph.coordinates.amax(0)
    assert graph.coordinates.dtype == torch.float32 and (low + high).tolist() == pytest.approx([1, 1], abs=1e-6)
    assert (high - low).max() == pytest.approx(1) and len(graph.coordinates.unique(dim=0)) == nodes


@pytest.mark.parametrize("name", [row[0] for row in SIZES] + ["city_30", "city_60", "city_60_3"])
@pytest.mark.parametrize("extra", [0, 4])
def test_tables(name, extra):
    """Everything follows from edge_mask: hops, slots in increasing order, and the row of removed players."""
    graph = make_graph(name)
    graph = make_graph(name, graph.num_slots + extra) if extra else graph
    plain, n, widest = PlainGraph(graph), graph.num_nodes, graph.num_slots - extra
    assert torch.equal(graph.edge_mask, graph.edge_mask.T) and not graph.edge_mask.diagonal().any()
    assert graph.slots.shape == graph.slot_mask.shape == (n + 1, widest + extra) and graph.edge_mask.shape == (n, n)
    assert {graph.slots.dtype, graph.distances.dtype} == {torch.int64} and graph.slot_mask.dtype == torch.bool
    for node, near in plain.near.items():
        assert graph.slots[node].tolist() == near + [0] * (graph.num_slots - len(near))
        assert graph.slot_mask[node].tolist() == [False] * len(near) + [True] * (graph.num_slots - len(near))
        assert graph.distances[node].tolist() == [plain.hops[node, b] for b in range(n)] + [2 * graph.diameter]
    assert max(map(len, plain.near.values())) == widest and max(plain.hops.values()) == graph.diameter
    assert graph.slots[-1].tolist() == [-1] * graph.num_slots and (graph.distances[-1] == 2 * graph.diameter).all()
    assert graph.slot_mask[-1].tolist() == [False] + [True] * (graph.num_slots - 1)


def test_features():
    graph = make_graph("cycle_8")
    features = graph.features(torch.tensor([[0, 3, -1], [-1, 6, 5]]))
    assert features.shape == (2, 8, 3) and features.dtype == torch.float32
    assert features[0, :, 0].tolist() == [0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25]
    assert features[0, :, 1].tolist() == [0.75, 0.5, 0.25, 0, 0.25, 0.5, 0.75, 1]
    assert (features[0, :, 2] == 2).all() and (features[1, :, 0] == 2).all() and features[1, 6, 1] == 0


def test_petersen_and_grid_are_what_they_are_called():
    """Petersen: 3-regular of girth 5, two nodes that are not adjacent have one common neighbour. Grids: by rows."""
    adjacent = (~make_graph("petersen").edge_mask).long() - torch.eye(10, dtype=torch.long)
    common = adjacent @ adjacent
    expected = torch.where(adjacent == 1, 0, 1)
    assert torch.equal(common, expected.fill_diagonal_(3))
    grid = make_graph("grid_3x4")
    assert grid.slots[5].tolist() == [1, 4, 5, 6, 9] and grid.distances[0, 11] == 5 and grid.distances[3, 8] == 5
    x, y = (grid.coordinates * 3 - torch.tensor([0, 0.5])).round().T.tolist()
    assert x == [0, 1, 2, 3] * 3 and y == [0] * 4 + [1] * 4 + [2] * 4
    assert make_graph("path_4").slots.tolist() == [[0, 1, 0], [0, 1, 2], [1, 2, 3], [2, 3, 0], [-1] * 3]
    assert make_graph("cycle_5").slots[0].tolist() == [0, 1, 4]


@pytest.mark.parametrize("name", ["city_30", "city_60", "city_60_3"])
def test_gabriel_graphs(name):
    """Edges by definition, by the circle's middle and radius; planar: at most 3n - 8 edges; degrees as in a city."""
    graph = make_graph(name)
    points, n = graph.coordinates.tolist(), graph.num_nodes
    for i, j in itertools.combinations(range(n), 2):
        middle, radius = [(a + b) / 2 for a, b in zip(points[i], points[j])], math.dist(points[i], points[j]) / 2
        gaps = [math.dist(points[k], middle) - radius for k in range(n) if k not in (i, j)]
        assert bool(graph.edge_mask[i, j]) == (min(gaps) < 0), (i, j)
    edges = ((~graph.edge_mask).sum() - n) // 2
    assert edges <= 3 * n - 8 and 3 < 2 * edges / n < 4.2
    assert graph.distances.max() == 2 * graph.diameter < 2 * n, "connected"


def test_cities_have_seeds():
    same, other, default = make_graph("city_60_3"), make_graph("city_60_4"), make_graph("city_60")
    assert torch.equal(make_graph("city_60_3").slots, same.slots)
    assert not torch.equal(other.edge_mask, same.edge_mask) and not torch.equal(default.edge_mask, same.edge_mask)
    assert torch.equal(make_graph("city_60_0").edge_mask, default.edge_mask)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    make_graph("city_60_7")
    assert torch.equal(torch.rand(1), expected), "the global generator is left alone"


WRONG = ["cycle", "cycle_2", "cycle_8_1", "path_1", "grid_6", "grid_1x1", "grid_6x", "Cycle_8", "petersen_3", "city"]
WRONG += ["city_1", "city_60_1_2", "complete_1", "", "star_5", "cycle_-8", "xcycle_8", "cycle_8 "]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_names(name):
    with pytest.raises(ValueError, match=r"No graph .*cycle_8, path_5, complete_4, grid_6x6, petersen, city_60"):
        make_graph(name)


def test_wrong_graphs():
    with pytest.raises(ValueError, match="5 slots, num_slots=4 are too few"):
        make_graph("grid_3x3", 4)
    with pytest.raises(ValueError, match="city_60 with 4 pursuers has 777600000 states, too many"):
        capture_times(graph_named("city_60"), 4)
    with pytest.raises(ValueError, match="lonely is not connected"):
        Graph("lonely", torch.tensor([[0, 1]]), torch.rand(3, 2))


def test_to():
    graph = make_graph("cycle_8")
    times = capture_tables(graph, 2, 1)[0]
    moved = graph.to("meta")
    assert graph.to("cpu") is graph and graph.slots.device.type == "cpu" and moved.name == "cycle_8"
    for name in ("distances", "slots", "slot_mask", "edge_mask", "coordinates"):
        assert getattr(moved, name).device.type == "meta", name
    assert moved.tables[2, 1][0].device.type == "meta" and graph.tables[2, 1][0] is times


# --- Capture times ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", CASES["classic_cops_and_robbers"]["results"], ids=ids)
def test_cops_and_robbers(row):
    times = capture_times(graph_named(row["graph"]), row["pursuers"], on_node=True)
    best = times.flatten(0, -2).amax(1).min().item()  # pursuers choose their nodes, then the evader chooses
    assert best == (math.inf if row["capture_time"] is None else row["capture_time"])


@pytest.mark.parametrize("row", CAPTURES["results"], ids=ids)
def test_capture_times(row):
    times = capture_times(graph_named(row["graph"]), row["pursuers"], row["adjacent_pursuers_needed"])
    finite = times[times < math.inf]
    assert times.shape == (graph_named(row["graph"]).num_nodes,) * (row["pursuers"] + 1)
    assert len(finite) / times.numel() == pytest.approx(row["fraction_of_states_with_forced_capture"], abs=1e-6)
    best = times.flatten(0, -2).amax(1).min().item()
    assert finite.max() == row["max_forced_capture_steps"]
    assert best == (math.inf if row["best_start_worst_case"] is None else row["best_start_worst_case"])


def test_capture_times_of_states():
    cycle, grid = (capture_times(graph_named(name), 2) for name in ("cycle_8", "grid_3x3"))
    assert cycle[0, 0].tolist() == CAPTURES["D_cycle8_p1_0_p2_0"]
    assert cycle[0, 4].tolist() == CAPTURES["D_cycle8_p1_0_p2_4"]
    assert grid[0, 0].tolist() == CAPTURES["D_grid3x3_p1_0_p2_0"]
    assert grid[0, 8].tolist() == CAPTURES["D_grid3x3_p1_0_p2_8"]


@pytest.mark.parametrize(
    "name, m, captors", [("path_5", 1, 1), ("grid_2x3", 2, 2), ("cycle_6", 3, 2), ("city_9", 2, 1)]
)
def test_capture_tables_by_hand(name, m, captors):
    """Times, the worst over the evader's moves and the best over the pursuers', against loops over dicts."""
    graph = make_graph(name, 7)
    plain = PlainGraph(graph)
    expected = plain.capture_times(m, captors)
    times, worst, best = capture_tables(graph, m, captors)
    for state, time in expected.items():
        assert times[state] == time, state
        assert worst[state] == max(expected[*state[:-1], e] for e in plain.near[state[-1]])
        assert best[state] == min(expected[*p, state[-1]] for p in plain.joint(state[:-1]))
    assert capture_tables(graph, m, captors)[0] is times and capture_tables(graph, m, 1)[0].min() == 0


# --- Scripted play ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shortest", "dp"])
def test_scripted_episodes(kind):
    expected = CASES["scripted_episodes_cycle8"][kind]
    game = GraphPursuit(graph_named("cycle_8"), 1, 0, "cpu")
    game.positions, found = torch.tensor(expected[:1]), expected[:1]
    while len(found) < len(expected):
        rewards, terminated, truncated, last = game.step(game.scripted(kind, game.positions))
        found = found + last.tolist()
        assert rewards == float(terminated) and not truncated
    assert found == expected and bool(terminated) == (kind == "dp")


@pytest.mark.parametrize("row", CASES["reference_policy_success"]["results"], ids=ids)
def test_reference_policies(row):
    """Every start of the games' own lists, played to its end."""
    graph = graph_named(row["graph"].replace("cycle", "cycle_").replace("grid", "grid_"))
    for start, rule in (("all", "independent"), ("same", "same")):
        starts = GraphPursuit(graph, 1, 0, "cpu", start=rule).starts()
        assert len(starts) == row[f"n_starts_{start}"] == len(starts.unique(dim=0))
        game = GraphPursuit(graph, len(starts), 0, "cpu", evader=row["evader"], start=rule)
        for kind, name in (("shortest", "shortest_path"), ("dp", "dp")):
            rate, steps, reward = play(game, kind, starts)
            assert rate == pytest.approx(row[f"{name}_{start}"][0], abs=1e-9) == pytest.approx(reward, abs=1e-6)
            assert rate == 0 or steps == pytest.approx(row[f"{name}_{start}"][1], abs=1e-9)


def test_published_grid():
    """R2PS, table 1: shortest paths never catch the asynchronous DP evader of a 10x10 grid; ours do once in 500."""
    graph, extra = graph_named("grid_10x10"), GRID["grid_10x10_extra"]
    times, random, starts = capture_tables(graph, 2, 1)[0].flatten(), np.random.RandomState(0), []
    assert torch.bincount(times.long()).tolist() == extra["histogram_of_D"]
    assert times[times > 0].double().mean().item() == pytest.approx(extra["mean_D_of_uncaptured_states"], abs=1e-6)
    while len(starts) < 500:
        p, q, e = (random.randint(100) for _ in range(3))
        if min(graph.distances[p, e], graph.distances[q, e]) > 2:
            starts.append([p, q, e])
    starts, options = torch.tensor(starts), {"evader": "dp", "start": "independent"}
    game = GraphPursuit(graph, 500, 0, "cpu", asynchronous=True, **options)
    assert (
        play(game, "shortest", starts)[0] == GRID["reproduced_pursuer_tie_evader_tie"]["Grid"]["first,first"] == 0.002
    )
    rate, steps, _ = play(game, "dp", starts)
    expected = times.view(100, 100, 100)[tuple(starts.T)].double().mean().item()
    assert rate == extra["dp_pursuer_success"] and steps == pytest.approx(expected), "both play best: exactly D steps"
    game = GraphPursuit(graph, 500, 0, "cpu", **options)
    assert play(game, "shortest", starts)[0] == 1.0, "the synchronous evader is caught"


def test_what_a_fixed_divergence_weight_costs():
    """Exact soft value iteration on the cycle of 8; transitions, rewards, reference and evader are the game's own."""
    config, T = SWEEP["config"], SWEEP["config"]["T"]
    alpha, eps, gamma = config["alpha"], config["eps"], config["gamma"]
    game = GraphPursuit(graph_named("cycle_8"), 1, 0, "cpu")
    states = torch.cartesian_prod(*[torch.arange(8)] * 3)  # (S,3)
    joint = torch.cartesian_prod(torch.arange(3), torch.arange(3))  # (A,2)
    evaders = game.move(states[:, -1:], game.scripted("maxdist", states, 1))  # (S,1)
    moved = game.move(states[:, :2].repeat_interleave(9, 0), joint.repeat(512, 1))  # (S*A,2)
    after = torch.cat([moved, evaders.repeat_interleave(9, 0)], 1)  # (S*A,3)
    rewards, ends = (values.view(512, 9).double() for values in game.outcome(after))  # (S,A) each
    following = (after @ torch.tensor([64, 8, 1])).view(512, 9)  # (S,A)
    reference = torch.nn.functional.one_hot(game.scripted("shortest", states), 3).double() * (1 - eps) + eps / 3
    log_rho = (reference[:, 0, :, None] * reference[:, 1, None]).flatten(1).log()  # (S,A)
    starts = game.starts() @ torch.tensor([64, 8, 1])  # (40,)

    def fixed_point(update):
        values = torch.zeros(512, dtype=torch.float64)
        for _ in range(5000):
            before, values = values, update(rewards + gamma * (1 - ends) * values[following])
            if (values - before).abs().max() < 1e-10:
                return values
        raise AssertionError("no convergence")

    def judge(policy: torch.Tensor) -> dict:
        """What a policy (S,A) brings from the starts."""
        mass, arrivals = torch.zeros(512, dtype=torch.float64), []  # (S,)
        mass[starts] = 1 / len(starts)
        for _ in range(T):
            flow = mass[:, None] * policy  # (S,A)
            arrivals.append((flow * ends).sum().item())
            mass = torch.zeros_like(mass).index_add(0, following.flatten(), (flow * (1 - ends)).flatten())
        success = sum(arrivals)
        return {
            "success_T": success,
            "mean_steps_given_success": sum(t * share for t, share in enumerate(arrivals, 1)) / success,
            "true_value_mean": fixed_point(lambda q: (policy * q).sum(1))[starts].mean().item(),
        }

    for row in [*SWEEP["table"], SWEEP["reference_policy"]]:
        if "beta" not in row:
            found = judge(log_rho.exp())
        else:
            beta, weight = row["beta"], alpha + row["beta"]
            soft = fixed_point(lambda q: weight * ((q + beta * log_rho) / weight).logsumexp(1))  # noqa: B023
            q = rewards + gamma * (1 - ends) * soft[following]
            log_pi = ((q + beta * log_rho) / weight).log_softmax(1)
            divergence = (log_pi.exp() * (log_pi - log_rho)).sum(1)[starts].mean().item()
            found = judge(log_pi.exp()) | {"beta": beta, "mean_kl_at_start": divergence}
            found["soft_value_mean"] = soft[starts].mean().item()
        assert found == pytest.approx(row, abs=6e-5)


# --- Pursuit ---------------------------------------------------------------------------------------------------------

SETTINGS = [  # graph, pursuers, captors
    ("cycle_8", 2, 1),
    ("grid_3x3", 2, 2),
    ("city_9", 3, 2),
    ("path_5", 1, 1),
]


@functools.cache
def plain_game(name: str, m: int, captors: int) -> tuple[PlainGraph, dict]:
    plain = PlainGraph(make_graph(name))
    return plain, plain.capture_times(m, captors)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("evader", ["dp", "maxdist", "stay", "learned"])
@pytest.mark.parametrize("name, m, captors", SETTINGS)
def test_pursuit_is_that_of_a_plain_game(name, m, captors, evader, asynchronous):
    """Six games, 40 steps of random moves: positions, rewards, ends, cuts, and how games begin."""
    plain, times = plain_game(name, m, captors)
    game = GraphPursuit(
        make_graph(name, 6),
        6,
        3,
        "cpu",
        num_pursuers=m,
        num_captors=captors,
        evader=evader,
        asynchronous=asynchronous,
        start="independent",
        horizon=5,
    )
    assert game.teams == (m, 1) and game.num_players == m + 1 and game.graph.num_slots == 6
    random, clocks, counts = np.random.RandomState(1), [0] * 6, {"ends": 0, "cuts": 0}
    for _ in range(40):
        before = game.positions.tolist()
        slots = [[random.randint(len(plain.near[p])) for p in row] for row in before]
        given = torch.tensor(slots)[:, -1:] if evader == "learned" else None
        rewards, terminated, truncated, last = game.step(torch.tensor(slots)[:, :-1], given)
        for number, row in enumerate(before):
            moved = [plain.near[p][slot] for p, slot in zip(row, slots[number])]
            if evader != "learned":
                moved[-1] = plain.evader(evader, asynchronous, row[:-1], moved[:-1], row[-1], times)
            caught = plain.captured(moved[:-1], moved[-1], captors)
            clocks[number] += 1
            cut = clocks[number] == 5 and not caught
            assert last[number].tolist() == moved
            result = rewards[number], terminated[number], truncated[number]
            assert [float(value) for value in result] == [caught, caught, cut]
            now = game.positions[number].tolist()
            if caught or cut:
                clocks[number] = 0
                assert not plain.captured(now[:-1], now[-1], captors)
            else:
                assert now == moved
            counts["ends"] += caught
            counts["cuts"] += cut
        assert game.steps.tolist() == clocks
    assert counts["cuts"] > 3 or name == "path_5"
    assert counts["ends"] > 3 or evader == "dp" and captors == 2


@pytest.mark.parametrize("name, m, captors", SETTINGS)
def test_scripts_of_pursuers_are_those_of_a_plain_game(name, m, captors):
    """Every state of the graph."""
    plain, times = plain_game(name, m, captors)
    game = GraphPursuit(make_graph(name, 6), 1, 0, "cpu", num_pursuers=m, num_captors=captors)
    states = torch.tensor(list(times))[:: 3 if m == 3 else 1]
    shortest, dp = (game.scripted(kind, states).tolist() for kind in ("shortest", "dp"))
    for state, near_slots, dp_slots in zip(states.tolist(), shortest, dp):
        *pursuers, evader = state
        for p, slot in zip(pursuers, near_slots):
            gaps = [plain.hops[node, evader] for node in plain.near[p]]
            assert slot == gaps.index(min(gaps))
        moves = plain.joint(pursuers)
        worst = [max(times[*move, e] for e in plain.near[evader]) for move in moves]
        move = moves[worst.index(min(worst))]
        assert [plain.near[p][slot] for p, slot in zip(pursuers, dp_slots)] == list(move)


def test_capture_is_tested_once_after_everybody_moved():
    """Two that cross on an edge end next to each other; who leaves in time is free, whoever came near before."""
    game = GraphPursuit(make_graph("cycle_8"), 2, 0, "cpu", num_pursuers=1, evader="learned")
    game.positions = torch.tensor([[0, 2], [0, 2]])
    away, onto = game.graph.slots[2].tolist().index(3), game.graph.slots[2].tolist().index(1)
    rewards, terminated, _, last = game.step(torch.tensor([[1], [1]]), torch.tensor([[away], [onto]]))
    assert last.tolist() == [[1, 3], [1, 1]] and terminated.tolist() == [False, True] and rewards.tolist() == [0, 1]


def test_asynchronous_evaders_see_the_new_nodes():
    """Pursuer at 0, evader at 2 of a cycle: it runs from where the pursuer is, or from where it will be."""
    for evader, expected in (("maxdist", {False: [3, 3], True: [3, 2]}), ("dp", {False: [3, 3], True: [3, 1]})):
        for asynchronous in (False, True):
            game = GraphPursuit(
                make_graph("cycle_6"), 2, 0, "cpu", num_pursuers=1, evader=evader, asynchronous=asynchronous
            )
            game.positions = torch.tensor([[0, 2], [0, 2]])
            last = game.step(torch.tensor([[1], [2]]))[3]  # to 1 and to 5
            assert last[:, 0].tolist() == [1, 5] and last[:, 1].tolist() == expected[asynchronous], (evader, last)


def test_random_evaders():
    graph = make_graph("grid_3x3", 7)
    game = GraphPursuit(graph, 6000, 0, "cpu", evader="random")
    game.positions = torch.tensor([[0, 0, 8]]).expand(6000, -1)
    last = game.step(torch.zeros(6000, 2, dtype=torch.long))[3]
    shares = torch.bincount(last[:, -1], minlength=9) / 6000
    assert shares.tolist() == pytest.approx([0, 0, 0, 0, 0, 1 / 3, 0, 1 / 3, 1 / 3], abs=0.025)
    assert not torch.equal(game.scripted("random", last), game.scripted("random", last))


def test_noisy_pursuers():
    """Each with chance 1/2 of a random slot, for itself: 3 slots in the corner leave the DP's with 2/3."""
    game = GraphPursuit(make_graph("grid_4x4", 7), 1, 0, "cpu")
    states = torch.tensor([[0, 0, 15]]).expand(9000, -1)
    same = game.scripted("noisy", states) == game.scripted("dp", states)
    assert same.float().mean(0).tolist() == pytest.approx([2 / 3] * 2, abs=0.025)
    assert same.all(1).float().mean().item() == pytest.approx(4 / 9, abs=0.03)
    confrontation = GraphConfrontation(make_graph("grid_4x4"), 1, 0, "cpu")
    states = torch.tensor([[0, -1, 15, 12]]).expand(9000, -1)
    noisy, shortest = (confrontation.scripted(kind, states) for kind in ("noisy", "shortest"))
    assert (noisy == shortest).float().mean(0).tolist() == pytest.approx([2 / 3, 1], abs=0.025)


@pytest.mark.parametrize("name", ["cycle_8", "grid_4x4", "grid_6x6", "petersen"])
@pytest.mark.parametrize("start", ["same", "far"])
def test_starts_on_one_node(name, start):
    graph = make_graph(name)
    game = GraphPursuit(graph, 3000, 0, "cpu", num_pursuers=3, start=start)
    least = 2 if start == "same" else min(6, graph.diameter)
    pairs = [(p, e) for p in range(graph.num_nodes) for e in range(graph.num_nodes) if graph.distances[p, e] >= least]
    assert game.starts().tolist() == [[p, p, p, e] for p, e in pairs]
    found = {tuple(row) for row in game.positions.tolist()}
    assert found <= {(p, p, p, e) for p, e in pairs} and len(found) > 0.9 * len(pairs) * (
        1 - math.exp(-3000 / len(pairs))
    )


@pytest.mark.parametrize(
    "name, m, captors", [("cycle_8", 2, 1), ("path_5", 2, 2), ("grid_2x3", 3, 2), ("petersen", 1, 1)]
)
def test_independent_starts_are_uniform(name, m, captors):
    """As often as each other (within 5 deviations), and exactly those in which nobody is captured."""
    graph, plain = make_graph(name), PlainGraph(make_graph(name))
    states = [s for s in itertools.product(plain.near, repeat=m + 1) if not plain.captured(s[:-1], s[-1], captors)]
    count = 200 * len(states)
    game = GraphPursuit(graph, count, 0, "cpu", num_pursuers=m, num_captors=captors, start="independent")
    assert [tuple(row) for row in game.starts().tolist()] == states
    found, counts = game.positions.unique(dim=0, return_counts=True)
    assert [tuple(row) for row in found.tolist()] == states
    assert (counts - 200).abs().max() < 5 * 200**0.5


def test_long_lists_of_starts_are_drawn():
    """The same for every seed of a game; a game's own generator is left alone."""
    for name, start, m in (("grid_6x6", "independent", 2), ("grid_13x13", "same", 2), ("city_60", "independent", 5)):
        game, other = (GraphPursuit(make_graph(name), 4, s, "cpu", num_pursuers=m, start=start) for s in (0, 1))
        before = game.generator.get_state()
        starts = game.starts()
        assert starts.shape == (2000, m + 1) and torch.equal(starts, other.starts())
        assert not game.outcome(starts)[1].any() and len(starts.unique(dim=0)) > 1800
        assert torch.equal(game.generator.get_state(), before)


def test_tables_are_shared_by_games_on_a_graph():
    graph = make_graph("cycle_8")
    games = [GraphPursuit(graph, 1, 0, "cpu", evader="dp") for _ in range(2)]
    for game in games:
        game.step(game.scripted("dp", game.positions))
    assert list(graph.tables) == [(2, 1)] and games[0].graph is games[1].graph is graph


@pytest.mark.parametrize(
    "options, text",
    [
        ({"evader": "fast"}, "No evader 'fast': choose one of dp, maxdist, random, stay, learned"),
        ({"start": "near"}, "No start 'near': choose one of same, far, independent"),
        ({"num_captors": 3}, "num_captors=3 must be from 1 to num_pursuers=2"),
        ({"num_captors": 0}, "num_captors=0 must be"),
    ],
)
def test_wrong_pursuits(options, text):
    with pytest.raises(ValueError, match=text):
        GraphPursuit(make_graph("cycle_8"), 1, 0, "cpu", **options)


def test_wrong_moves():
    game = GraphPursuit(make_graph("path_5"), 2, 0, "cpu", evader="learned")
    actions, theirs = torch.zeros(2, 2, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long)
    before = game.positions
    for wrong, given, text in (
        (actions, None, "A learned evader does not move by itself"),
        (actions[:1], theirs, r"shape \(1, 2\), \(2, 2\) is needed"),
        (actions[:, :1], theirs, "shape"),
        (actions, theirs[:, 0], "shape"),
        (torch.full((2, 2), 2), theirs, "padded slot"),
    ):
        game.positions = torch.tensor([[0, 0, 4], [0, 0, 4]])
        with pytest.raises(ValueError, match=text):
            game.step(wrong, given)
    game.positions = before
    for side, kind in ((0, "maxdist"), (1, "shortest"), (1, "noisy"), (0, "learned"), (1, "learned")):
        with pytest.raises(ValueError, match=f"Side {side} has no script '{kind}'"):
            game.scripted(kind, game.positions, side)
    with pytest.raises(ValueError, match="complete_4 has no start"):
        GraphPursuit(make_graph("complete_4"), 1, 0, "cpu")


# --- Confrontation ---------------------------------------------------------------------------------------------------


def plain_slots(plain: PlainGraph, own: list[int], others: list[int]) -> list[int]:
    slots = []
    for node in own:
        gaps = [0] if node < 0 else [min(plain.hops[near, o] for o in others if o >= 0) for near in plain.near[node]]
        slots.append(gaps.index(min(gaps)))
    return slots


@pytest.mark.parametrize("name, k", [("cycle_8", 2), ("grid_4x4", 3), ("city_20", 4)])
@pytest.mark.parametrize("scripted", [False, True])
def test_confrontation_is_that_of_a_plain_game(name, k, scripted):
    """Eight games, 80 steps: who is removed, who wins, cuts, and the script of the opponents."""
    game, plain = (
        GraphConfrontation(make_graph(name, 9), 8, 0, "cpu", team_size=k, horizon=12),
        PlainGraph(make_graph(name)),
    )
    random, clocks, found = np.random.RandomState(2), [0] * 8, {"won": 0, "lost": 0, "cut": 0, "removed": 0}
    assert game.teams == (k, k) and game.num_players == 2 * k
    for _ in range(80):
        before = game.positions.tolist()
        slots = [[random.randint(len(plain.near[p])) if p >= 0 else 0 for p in row] for row in before]
        if scripted:
            slots = [line[:k] + plain_slots(plain, row[k:], row[:k]) for line, row in zip(slots, before)]
        actions, theirs = torch.tensor(slots).split(k, 1)
        rewards, terminated, truncated, last = game.step(actions, None if scripted else theirs)
        for number, row in enumerate(before):
            moved = [plain.near[p][slot] if p >= 0 else -1 for p, slot in zip(row, slots[number])]
            left, reward, ended = plain.duel(moved, k)
            clocks[number] += 1
            cut = clocks[number] == 12 and not ended
            assert last[number].tolist() == left
            result = rewards[number], terminated[number], truncated[number]
            assert [float(value) for value in result] == [reward, ended, cut]
            if ended or cut:
                clocks[number] = 0
                assert game.positions[number].min() >= 0
            else:
                assert game.positions[number].tolist() == left
            found["won"] += reward > 0
            found["lost"] += reward < 0
            found["cut"] += cut
            found["removed"] += left.count(-1) > row.count(-1)
        assert game.steps.tolist() == clocks
        assert all(torch.equal(a, b) for a, b in zip(game.outcome(last), (rewards, terminated)))
    assert found["removed"] > 3 and found["won"] + found["lost"] + found["cut"] > 5, found


def test_scripts_of_both_teams_are_those_of_a_plain_game():
    plain, game = (
        PlainGraph(make_graph("city_20")),
        GraphConfrontation(make_graph("city_20", 9), 1, 0, "cpu", team_size=3),
    )
    states = torch.randint(-1, 20, (400, 6), generator=torch.Generator().manual_seed(0))
    states = states[(states[:, :3] >= 0).any(1) & (states[:, 3:] >= 0).any(1)]
    for side in (0, 1):
        for row, slots in zip(states.tolist(), game.scripted("shortest", states, side).tolist()):
            teams = row[:3], row[3:]
            assert slots == plain_slots(plain, teams[side], teams[1 - side])


@pytest.mark.parametrize(
    "positions, left, result",
    [  # on the path of 9: two against two
        ([0, 1, 2, 8], [0, 1, 2, 8], (0, False)),  # one against one, whose mate is two hops away
        ([0, 4, 3, 5], [0, -1, 3, 5], (0, False)),  # one between two
        ([4, -1, 3, 5], [-1, -1, 3, 5], (-1, True)),
        ([3, 5, 4, -1], [3, 5, -1, -1], (1, True)),
        ([4, 4, 4, 5], [4, 4, 4, 5], (0, False)),  # two against two
        ([-1, 4, 4, -1], [-1, 4, 4, -1], (0, False)),  # one against one
        ([-1, -1, -1, -1], [-1, -1, -1, -1], (0, True)),
        ([0, 2, 4, 6], [0, 2, 4, 6], (0, False)),  # two hops are too far
    ],
)
def test_who_is_removed(positions, left, result):
    game = GraphConfrontation(make_graph("path_9"), 1, 0, "cpu")
    settled = game.settle(torch.tensor([positions]))
    assert settled.tolist() == [left]
    reward, terminated = game.outcome(settled)
    assert (reward.item(), terminated.item()) == result and reward.dtype == torch.float32


def test_removed_players_stay_away():
    """One slot that leads nowhere; nobody follows them, they count for nobody, and another slot is an error."""
    game = GraphConfrontation(make_graph("cycle_8", 5), 2, 0, "cpu")
    game.positions = torch.tensor([[-1, 0, 4, -1], [0, 1, 4, 5]])
    for kind in ("shortest", "random", "noisy"):
        assert game.scripted(kind, game.positions, 0)[0, 0] == 0 == game.scripted(kind, game.positions, 1)[0, 1]
    with pytest.raises(ValueError, match="padded slot"):
        game.step(torch.tensor([[1, 0], [0, 0]]))
    last = game.step(game.scripted("shortest", game.positions))[3]
    assert last.tolist() == [[-1, 1, 3, -1], [7, 2, 3, 6]]
    features = game.graph.features(last)
    assert (features[0, :, [0, 3]] == 2).all() and features[0, 1, 1] == 0 and features.max() == 2


@pytest.mark.parametrize("name, k", [("grid_6x6", 2), ("grid_6x6", 3), ("cycle_8", 2), ("city_60", 4)])
def test_confrontations_begin_apart(name, k):
    game = GraphConfrontation(make_graph(name), 1500, 0, "cpu", team_size=k)
    places, n = game.positions, game.graph.num_nodes
    assert (places.sort(1).values.diff(dim=1) > 0).all() and places.min() >= 0 and places.max() < n
    assert game.graph.distances[places[:, :k, None], places[:, None, k:]].min() == 3
    for player in range(2 * k):
        counts = torch.bincount(places[:, player], minlength=n)
        assert counts.min() > 1500 / n / 5 and counts.max() < 1500 / n * 4, "from everywhere"
    starts = game.starts()
    assert starts.shape == (2000, 2 * k) and (
        len(starts.unique(dim=0)) == 32 if n == 8 else len(starts.unique(dim=0)) > 1900
    )
    assert torch.equal(starts, GraphConfrontation(make_graph(name), 1, 9, "cpu", team_size=k).starts())


def test_small_graphs_begin_as_far_apart_as_they_can():
    for name, gap in (("path_5", 2), ("complete_4", 1), ("cycle_6", 2)):
        game = GraphConfrontation(make_graph(name), 300, 0, "cpu")
        places = game.positions
        assert (places.sort(1).values.diff(dim=1) > 0).all()
        gaps = game.graph.distances[places[:, :2, None], places[:, None, 2:]].flatten(1).amin(1)
        assert (gaps == gap).float().mean() > 0.95, (name, gaps.bincount())


def test_wrong_confrontations():
    with pytest.raises(ValueError, match="No opponent 'dp': choose one of shortest, random"):
        GraphConfrontation(make_graph("cycle_8"), 1, 0, "cpu", opponent="dp")
    with pytest.raises(ValueError, match="cycle_5 has 5 nodes, 6 players need one each"):
        GraphConfrontation(make_graph("cycle_5"), 1, 0, "cpu", team_size=3)
    game = GraphConfrontation(make_graph("cycle_8"), 1, 0, "cpu")
    with pytest.raises(ValueError, match="Side 1 has no script 'dp'"):
        game.scripted("dp", game.positions, 1)


def test_random_opponents():
    game = GraphConfrontation(make_graph("cycle_8"), 3000, 0, "cpu", opponent="random")
    game.positions = torch.tensor([[0, 1, 4, 5]]).expand(3000, -1)
    last = game.step(torch.tensor([[0, 1]]).expand(3000, -1))[3]
    shares = torch.bincount(last[:, 2], minlength=8) / 3000
    assert shares.tolist() == pytest.approx([0, 0, 0, 1 / 3, 1 / 3, 1 / 3, 0, 0], abs=0.03)


def test_shortest_paths_beat_random_walks():
    graph, results = make_graph("grid_6x6"), {}
    for kind, opponent in (("shortest", "random"), ("random", "shortest")):
        game = GraphConfrontation(graph, 200, 0, "cpu", team_size=3, opponent=opponent)
        results[kind] = play(game, kind, game.starts()[:200], 64)[2]
    assert results["shortest"] > 0.2 and results["random"] < -0.2, results


# --- Both games ------------------------------------------------------------------------------------------------------


def both_games(num_envs: int, seed: int) -> list[GraphGame]:
    graph = graph_named("grid_4x4")
    pursuit = GraphPursuit(graph, num_envs, seed, "cpu", evader="random", start="independent", horizon=9)
    duel = GraphConfrontation(graph, num_envs, seed, "cpu", opponent="random", horizon=9)
    return [pursuit, duel]


def walk(game: GraphGame, steps: int) -> list[torch.Tensor]:
    """All that random play shows."""
    return [x for _ in range(steps) for x in (*game.step(game.scripted("noisy", game.positions)), game.positions)]


@pytest.mark.parametrize("number", [0, 1])
def test_same_seed_same_games_and_resume(number):
    game, same, other = (both_games(16, seed)[number] for seed in (1, 1, 2))
    assert not torch.equal(game.positions, other.positions)
    first = walk(game, 15)
    assert all(torch.equal(a, b) for a, b in zip(first, walk(same, 15)))
    state = game.state_dict()
    expected = walk(game, 25)
    other.load_state_dict(state)
    found = walk(other, 25)
    assert len(found) == 125 and all(torch.equal(a, b) for a, b in zip(expected, found))
    assert torch.equal(other.steps, game.steps)
    other.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(expected, walk(other, 25))), "a state can be taken twice"


def test_seeds_of_games_leave_the_global_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    for game in both_games(8, 0):
        walk(game, 10)
        game.starts()
    assert torch.equal(torch.rand(1), expected)


def test_last_is_not_touched_by_new_games():
    for game in both_games(32, 0):
        for _ in range(20):
            _, terminated, truncated, last = game.step(game.scripted("random", game.positions))
            anew, kept = terminated | truncated, last.clone()
            assert torch.equal(game.positions[~anew], last[~anew]) and (game.steps[anew] == 0).all()
            game.step(game.scripted("random", game.positions))
            assert torch.equal(last, kept)


def test_games_that_end_together_begin_apart_from_each_other():
    for game in both_games(64, 0):
        game.steps = torch.full((64,), 8)
        _, terminated, truncated, _ = game.step(game.scripted("random", game.positions))
        assert (terminated | truncated).all() and len(game.positions.unique(dim=0)) > 50


def test_view():
    positions = torch.tensor([[10, 11, 12, 13, 14]])
    pursuit = GraphPursuit(make_graph("grid_6x6"), 1, 0, "cpu", num_pursuers=4)
    assert pursuit.view(positions, 0).tolist() == [[14, 10, 11, 12, 13]]
    assert pursuit.view(positions, 1).tolist() == positions.tolist()
    duel = GraphConfrontation(make_graph("grid_6x6"), 1, 0, "cpu", team_size=2)
    assert duel.view(positions[:, :4], 0).tolist() == [[12, 13, 10, 11]]
    assert duel.view(positions[:, :4], 1).tolist() == [[10, 11, 12, 13]]


def test_pictures():
    """Disks in the teams' colours where players are, edges and nodes in grey, one on top of another side by side."""
    blue, orange, white, node = [40, 110, 230], [240, 120, 20], [255] * 3, [110] * 3
    game = GraphPursuit(make_graph("grid_3x3"), 1, 0, "cpu")
    picture = game.picture(torch.tensor([0, 5, 7]))
    assert picture.shape == (320, 320, 3) and picture.dtype == torch.uint8
    assert [picture[y, x].tolist() for y, x in ((30, 30), (160, 290), (290, 160))] == [blue, blue, orange]
    assert picture[160, 160].tolist() == node and picture[95, 95].tolist() == white == picture[0, 0].tolist()
    assert picture[95, 160].tolist() == picture[160, 95].tolist() == [190] * 3
    areas = [(picture == torch.tensor(colour).byte()).all(-1).sum().item() for colour in (blue, orange)]
    assert areas[0] == 2 * areas[1] > 250
    together = game.picture(torch.tensor([0, 0, 0]))
    assert [(together == torch.tensor(c).byte()).all(-1).any().item() for c in (blue, orange)] == [True, True]
    assert together[22, 30].tolist() == blue and together[160, 290].tolist() == node
    duel = GraphConfrontation(game.graph, 1, 0, "cpu").picture(torch.tensor([0, -1, -1, 8]))
    assert duel[30, 30].tolist() == blue and duel[290, 290].tolist() == orange
    assert (duel == torch.tensor(blue).byte()).all(-1).sum() == areas[1], "the removed are not drawn"
    for name in ("city_60", "cycle_8", "path_5"):
        empty = make_graph(name).picture(torch.tensor([-1]), 1)
        assert (empty[:20] == 255).all() and (empty[:, -20:] == 255).all() and (empty < 255).any()
