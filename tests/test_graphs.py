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


def play(game: GraphGame, kind: str, starts: torch.Tensor, steps: int = 128) -> tuple[float, float]:
    """Success rate and mean steps of successes of scripted pursuers, each game until it ends."""
    game.positions, game.steps = starts.clone(), torch.zeros(len(starts), dtype=torch.long)
    lengths, running = torch.zeros(len(starts)), torch.ones(len(starts), dtype=torch.bool)
    for step in range(1, steps + 1):
        _, terminated, truncated, _ = game.step(game.scripted(kind, game.positions))
        lengths[running & terminated] = step
        running &= ~(terminated | truncated)
        if not running.any():
            break
    captured = lengths > 0
    return captured.double().mean().item(), lengths[captured].double().mean().item()


# --- Graphs ----------------------------------------------------------------------------------------------------------

SIZES = [  # name, nodes, edges, K, diameter
    ("cycle_8", 8, 8, 3, 4),
    ("path_5", 5, 4, 3, 4),
    ("grid_6x6", 36, 60, 5, 10),
    ("grid_2x3", 6, 7, 4, 3),
    ("complete_4", 4, 6, 4, 1),
    ("petersen", 10, 15, 4, 2),
]


@pytest.mark.parametrize("name, nodes, edges, slots, diameter", SIZES)
def test_sizes(name, nodes, edges, slots, diameter):
    graph = make_graph(name)
    assert (graph.num_nodes, graph.num_slots, graph.diameter) == (nodes, slots, diameter)
    assert (~graph.edge_mask).sum() == nodes + 2 * edges
    low, high = graph.coordinates.amin(0), graph.coordinates.amax(0)
    assert (low + high).tolist() == pytest.approx([1, 1], abs=1e-6) and (high - low).max() == pytest.approx(1)


@pytest.mark.parametrize("name", [row[0] for row in SIZES] + ["city_60_3"])
def test_tables(name):
    """Everything follows from edge_mask: hops, slots in increasing order, and the row of removed players."""
    K = make_graph(name).num_slots + 4
    graph = make_graph(name, K)
    plain, n = PlainGraph(graph), graph.num_nodes
    assert torch.equal(graph.edge_mask, graph.edge_mask.T) and not graph.edge_mask.diagonal().any()
    for node, near in plain.near.items():
        assert graph.slots[node].tolist() == near + [0] * (K - len(near))
        assert graph.slot_mask[node].tolist() == [False] * len(near) + [True] * (K - len(near))
        assert graph.distances[node].tolist() == [plain.hops[node, b] for b in range(n)] + [2 * graph.diameter]
    assert max(map(len, plain.near.values())) == K - 4 and max(plain.hops.values()) == graph.diameter
    assert graph.slots[-1].tolist() == [-1] * K and (graph.distances[-1] == 2 * graph.diameter).all()
    assert graph.slot_mask[-1].tolist() == [False] + [True] * (K - 1)


def test_features():
    graph = make_graph("cycle_8")
    features = graph.features(torch.tensor([[0, 3, -1], [-1, 6, 5]]))
    assert features.shape == (2, 8, 3) and features.dtype == torch.float32
    assert features[0, :, 0].tolist() == [0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25]
    assert features[0, :, 1].tolist() == [0.75, 0.5, 0.25, 0, 0.25, 0.5, 0.75, 1]
    assert (features[0, :, 2] == 2).all() and (features[1, :, 0] == 2).all() and features[1, 6, 1] == 0


def test_to():
    graph = make_graph("cycle_8")
    capture_tables(graph, 2, 1)
    moved = graph.to("meta")
    assert graph.slots.device.type == "cpu" and moved.tables[2, 1][0].device.type == "meta"
    for name in ("distances", "slots", "slot_mask", "edge_mask", "coordinates"):
        assert getattr(moved, name).device.type == "meta", name


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
    assert len(finite) / times.numel() == pytest.approx(row["fraction_of_states_with_forced_capture"], abs=1e-6)
    best = times.flatten(0, -2).amax(1).min().item()
    assert finite.max() == row["max_forced_capture_steps"]
    assert best == (math.inf if row["best_start_worst_case"] is None else row["best_start_worst_case"])


@pytest.mark.parametrize("name, graph, node", [("cycle8", "cycle_8", 4), ("grid3x3", "grid_3x3", 8)])
def test_capture_times_of_states(name, graph, node):
    times = capture_times(graph_named(graph), 2)
    for second in (0, node):
        assert times[0, second].tolist() == CAPTURES[f"D_{name}_p1_0_p2_{second}"]


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
            rate, steps = play(game, kind, starts)
            assert rate == pytest.approx(row[f"{name}_{start}"][0], abs=1e-9)
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
    expected = GRID["reproduced_pursuer_tie_evader_tie"]["Grid"]["first,first"]
    assert play(game, "shortest", starts)[0] == expected == 0.002
    rate, steps = play(game, "dp", starts)
    expected = times.view(100, 100, 100)[tuple(starts.T)].double().mean().item()
    assert rate == extra["dp_pursuer_success"] and steps == pytest.approx(expected), "both play best: exactly D steps"
    game = GraphPursuit(graph, 500, 0, "cpu", **options)
    assert play(game, "shortest", starts)[0] == 1.0, "the synchronous evader is caught"


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
    options = {"num_pursuers": m, "num_captors": captors, "evader": evader, "asynchronous": asynchronous}
    game = GraphPursuit(make_graph(name, 6), 6, 3, "cpu", **options, start="independent", horizon=5)
    random, clocks, ends, cuts = np.random.RandomState(1), [0] * 6, 0, 0
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
            assert not plain.captured(now[:-1], now[-1], captors) if caught or cut else now == moved
            ends, cuts = ends + caught, cuts + cut
        assert game.steps.tolist() == clocks
    assert cuts > 3 or name == "path_5"
    assert ends > 3 or evader == "dp" and captors == 2


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


@pytest.mark.parametrize("name, start, m", [("grid_13x13", "same", 2), ("city_60", "independent", 5)])
def test_long_lists_of_starts_are_drawn(name, start, m):
    """The same for every seed of a game; a game's own generator is left alone."""
    game, other = (GraphPursuit(make_graph(name), 4, s, "cpu", num_pursuers=m, start=start) for s in (0, 1))
    before, starts = game.generator.get_state(), game.starts()
    assert starts.shape == (2000, m + 1) and torch.equal(starts, other.starts())
    assert not game.outcome(starts)[1].any() and torch.equal(game.generator.get_state(), before)


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
    game = GraphConfrontation(make_graph(name, 9), 8, 0, "cpu", team_size=k, horizon=12)
    plain = PlainGraph(make_graph(name))
    random, clocks, removed, ends = np.random.RandomState(2), [0] * 8, 0, 0
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
            now = game.positions[number].tolist()
            assert min(now) >= 0 if ended or cut else now == left
            removed += left.count(-1) > row.count(-1)
            ends += ended or cut
        assert game.steps.tolist() == clocks
    assert removed > 3 and ends > 5


@pytest.mark.parametrize("side", [0, 1])
def test_scripts_of_both_teams_are_those_of_a_plain_game(side):
    plain = PlainGraph(make_graph("city_20"))
    game = GraphConfrontation(make_graph("city_20", 9), 1, 0, "cpu", team_size=3)
    states = torch.randint(-1, 20, (400, 6), generator=torch.Generator().manual_seed(0))
    states = states[(states[:, :3] >= 0).any(1) & (states[:, 3:] >= 0).any(1)]
    for row, slots in zip(states.tolist(), game.scripted("shortest", states, side).tolist()):
        teams = row[:3], row[3:]
        assert slots == plain_slots(plain, teams[side], teams[1 - side])


def test_removed_players_stay_away():
    """One slot that leads nowhere; nobody follows them, they count for nobody, and another slot is an error."""
    game = GraphConfrontation(make_graph("cycle_8", 5), 2, 0, "cpu")
    game.positions = torch.tensor([[-1, 0, 4, -1], [0, 1, 4, 5]])
    with pytest.raises(ValueError, match="padded slot"):
        game.step(torch.tensor([[1, 0], [0, 0]]))
    last = game.step(game.scripted("shortest", game.positions))[3]
    assert last.tolist() == [[-1, 1, 3, -1], [7, 2, 3, 6]]


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
