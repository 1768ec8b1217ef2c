"""Games on graphs, batched in torch: pursuit of an evader, and confrontation of two teams that
outnumber each other.

The rules of pursuit are those of EPG and R2PS (github.com/Cahemgco/EPG_code; arXiv 2511.17367),
those of confrontation are ours. Players stand on nodes, team 0 first in every list; -1 is a removed
player. Actions are slots of graphs.py. Ties go to the first slot, that is to the lowest node, in
every argmin and argmax; joint moves count the first pursuer's slot as the highest digit.

Letters in shapes: E games, P players of both teams, m pursuers, k players of a team, n nodes, K
slots, B any batch of positions.
"""

import functools
import math

import torch
from torch import Tensor

from envs.graphs import Graph, capture_tables

MOST_LISTED = 10**6  # all starts are listed if there are no more candidates than this
DRAWN_STARTS = 10_000  # else so many random ones are


def least(hops: Tensor, axis: int) -> Tensor:
    """hops.amin(axis) for an axis of a few players, where torch's own is ten times slower."""
    return functools.reduce(torch.minimum, hops.unbind(axis))


class GraphGame:
    """What both games share: E games of two teams; a game that ends begins anew in the same step.

    `starts` (S,P) are all starts, or many random ones, in a random order that is always the same.
    """

    def __init__(self, graph: Graph, device, teams: tuple[int, int], horizon: int):
        """`horizon`: steps after which a game is cut off (truncated, not terminated)."""
        self.graph = graph
        self.teams = teams
        self.num_players = sum(teams)
        self.horizon = horizon
        generator = torch.Generator().manual_seed(0)
        starts = self.find_starts(generator)  # (S,P)
        order = torch.randperm(len(starts), generator=generator)  # (S,)
        self.starts = starts[order].to(device)
        self.device = self.starts.device
        self.graph = graph.to(self.device)

    def reset(self, num_envs: int, seed: int) -> None:
        """Begin E games anew."""
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.positions = self.draw_starts(num_envs)  # (E,P)
        self.steps = torch.zeros(num_envs, dtype=torch.long, device=self.device)  # (E,)

    def draw_starts(self, count: int) -> Tensor:
        """Random starts, all equally likely. -> (count,P)"""
        options = {"generator": self.generator, "device": self.device}
        return self.starts[torch.randint(len(self.starts), (count,), **options)]

    def view(self, positions: Tensor, side: int) -> Tensor:
        """Opponents of `side` first, then its own players, in their order. (B,P) -> (B,P)"""
        first, second = positions.split(self.teams, 1)
        return torch.cat([first, second] if side else [second, first], 1)

    def step(
        self, actions: Tensor, opponent_actions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Slots (E,size of team 0), (E,size of team 1)
        -> rewards (E,), terminated (E,), truncated (E,), last (E,P).

        Without `opponent_actions` team 1 follows its script. Rewards are those of team 0; `last`
        are the positions before new games began.
        """
        mine, theirs = self.positions.split(self.teams, 1)  # (E,size) each
        moved = self.graph.slots[mine, actions]  # (E,size of team 0)
        if opponent_actions is None:
            opponent_actions = self.answer(moved)
        last = self.settle(torch.cat([moved, self.graph.slots[theirs, opponent_actions]], 1))
        rewards, terminated = self.outcome(last)  # (E,) each
        self.steps = self.steps + 1
        truncated = (self.steps >= self.horizon) & ~terminated  # (E,)
        ended = terminated | truncated  # (E,)
        fresh = self.draw_starts(len(last))  # (E,P), for all games: choosing would wait for the GPU
        self.positions = torch.where(ended[:, None], fresh, last)
        self.steps = self.steps.masked_fill(ended, 0)
        return rewards, terminated, truncated, last

    def settle(self, positions: Tensor) -> Tensor:
        """What is left of the players after a move. (B,P) -> (B,P)"""
        return positions

    def random_slots(self, positions: Tensor) -> Tensor:
        """Uniform among the open slots, by the game's generator. (B,p) -> (B,p)"""
        uniform = torch.rand(positions.shape, generator=self.generator, device=self.device)
        num_open = (~self.graph.slot_mask[positions]).sum(-1)  # (B,p)
        return (uniform * num_open).long()

    def nearest_slots(self, positions: Tensor, targets: Tensor) -> Tensor:
        """One step on a shortest path to the nearest target that is not removed.

        (B,p), (B,q) -> (B,p)
        """
        nodes = self.graph.slots[positions]  # (B,p,K)
        hops = least(self.graph.distances[nodes[..., None], targets[:, None, None]], -1)  # (B,p,K)
        closed = self.graph.slot_mask[positions]  # (B,p,K)
        return hops.masked_fill(closed, 3 * self.graph.diameter).argmin(-1)

    def noisy(self, positions: Tensor, slots: Tensor) -> Tensor:
        """Every player takes a random slot with chance 1/2. (B,p), (B,p) -> (B,p)"""
        uniform = torch.rand(slots.shape, generator=self.generator, device=self.device)
        return torch.where(uniform < 0.5, slots, self.random_slots(positions))


class GraphPursuit(GraphGame):
    """Pursuers, team 0, win 1 when `num_captors` of them are on or next to the evader's node after
    a step.

    evader: `dp` (argmax of the worst-case steps to capture, over the pursuers' best joint move),
    `maxdist` (argmax of the hops to the nearest pursuer), `random`, `stay`, or `learned` (actions
    come with step; without them it is `dp`). All move at once; `asynchronous` lets the scripted
    evader see the pursuers' new nodes. start: `same` node for all pursuers, `far` (the same, more than 5 hops from the evader or
    else the diameter), `independent` nodes. Nobody is captured at the start.
    """

    EVADERS = ("dp", "maxdist", "random", "stay")
    PURSUERS = ("shortest", "dp", "noisy", "random")

    def __init__(
        self,
        graph: Graph,
        device,
        *,
        num_pursuers: int = 2,
        num_captors: int = 1,
        evader: str = "maxdist",
        asynchronous: bool = False,
        start: str = "same",
        horizon: int = 128,
    ):
        if not 1 <= num_captors <= num_pursuers:
            raise ValueError(f"num_captors={num_captors}: from 1 to the {num_pursuers} pursuers")
        if graph.diameter < 2:
            raise ValueError(f"{graph.name} has no start at which the evader is not captured.")
        if evader == "learned" and asynchronous:
            raise ValueError("A learned evader moves at the same time as the pursuers.")
        self.num_captors = num_captors
        self.evader = evader
        self.asynchronous = asynchronous
        self.start = start
        super().__init__(graph, device, (num_pursuers, 1), horizon)

    def outcome(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards of the pursuers (B,), terminated (B,) of positions (B,P)."""
        near = self.graph.distances[positions[:, :-1], positions[:, -1:]] <= 1  # (B,m)
        captured = near.sum(1) >= self.num_captors  # (B,)
        return captured.float(), captured

    def find_starts(self, generator: torch.Generator) -> Tensor:
        """All starts of the rule, if they are not too many to list, else random ones. -> (S,P)"""
        n = self.graph.num_nodes
        m = self.teams[0]
        hops = self.graph.distances[:n, :n]  # (n,n)
        apart = min(6, self.graph.diameter) if self.start == "far" else 2  # hops, at least
        together = self.start != "independent"
        if together and n**2 <= MOST_LISTED:
            pairs = (hops >= apart).nonzero()  # (S,2)
            return pairs[:, [0] * m + [1]]
        if not together and n ** (m + 1) <= MOST_LISTED:
            states = torch.cartesian_prod(*[torch.arange(n)] * (m + 1))  # (n^P,P)
            return states[~self.outcome(states)[1]]
        evaders = torch.randint(n, (DRAWN_STARTS, 1), generator=generator)  # (S,1)
        gaps = hops[evaders[:, 0]].clamp(max=apart)  # (S,n): the largest are the nodes far enough
        pursuers = [random_argmax(gaps, generator) for _ in range(1 if together else m)]
        return torch.cat([torch.cat(pursuers, 1).expand(-1, m), evaders], 1)

    def answer(self, moved: Tensor) -> Tensor:
        """Slots (E,1) of the scripted evader, when the pursuers move to `moved` (E,m)."""
        seen = moved if self.asynchronous else self.positions[:, :-1]  # (E,m)
        kind = "dp" if self.evader == "learned" else self.evader
        return self.scripted(kind, torch.cat([seen, self.positions[:, -1:]], 1), 1)

    def scripted(self, kind: str, positions: Tensor, side: int = 0) -> Tensor:
        """Slots of a script at positions (B,P) -> (B,m) or, for side 1, (B,1).

        side 0: `shortest` path to the evader, `dp` (joint argmin of the worst steps to capture),
        `noisy` (dp, random with chance 1/2), `random`. side 1: the evaders; in an asynchronous game
        pursuers stand on their new nodes.
        """
        if kind not in (self.EVADERS if side else self.PURSUERS):
            raise ValueError(f"Side {side} has no script {kind!r}.")
        own = positions.split(self.teams, 1)[side]  # (B,size)
        if kind == "random":
            return self.random_slots(own)
        if side:
            return self.evader_slots(kind, positions)
        if kind == "shortest":
            return self.nearest_slots(own, positions[:, -1:])
        slots = self.best_slots(positions)  # (B,m)
        return slots if kind == "dp" else self.noisy(own, slots)

    def evader_slots(self, kind: str, positions: Tensor) -> Tensor:
        """Slots of an evader that follows a rule. (B,P) -> (B,1)"""
        pursuers = positions[:, :-1, None]  # (B,m,1)
        own = positions[:, -1:]  # (B,1)
        nodes = self.graph.slots[own[:, 0]]  # (B,K)
        if kind == "stay":
            values = (nodes == own).float()  # (B,K)
        elif kind == "maxdist":
            values = least(self.graph.distances[nodes[:, None], pursuers], 1)  # (B,K)
        else:
            times, _, best = capture_tables(self.graph, self.teams[0], self.num_captors)
            table = times if self.asynchronous else best  # (n,..,n)
            values = table[(*pursuers.unbind(1), nodes)]  # (B,K)
        closed = self.graph.slot_mask[own[:, 0]]  # (B,K)
        return values.masked_fill(closed, -1).argmax(1, keepdim=True)

    def best_slots(self, positions: Tensor) -> Tensor:
        """Joint move with the least worst case of the steps to capture. (B,P) -> (B,m)"""
        m = self.teams[0]
        K = self.graph.num_slots
        nodes = []
        closed = torch.zeros((), dtype=torch.bool, device=self.device)
        for pursuer in range(m):  # pursuer i has the axis i + 1
            shape = [K if axis == pursuer else 1 for axis in range(m)]
            place = positions[:, pursuer]  # (B,)
            nodes.append(self.graph.slots[place].view(-1, *shape))
            closed = closed | self.graph.slot_mask[place].view(-1, *shape)  # (B,K,..,K)
        evaders = positions[:, -1].view(-1, *[1] * m)
        worst = capture_tables(self.graph, m, self.num_captors)[1]  # (n,..,n)
        values = worst[(*nodes, evaders)].masked_fill(closed, math.inf)  # (B,K,..,K)
        joint = values.flatten(1).argmin(1)  # (B,)
        digits = [joint // K ** (m - 1 - pursuer) % K for pursuer in range(m)]
        return torch.stack(digits, 1)


class GraphConfrontation(GraphGame):
    """Two teams of k (rules ours): after a move, players are removed whom opponents within one hop
    outnumber.

    Their own side counts who is within one hop of them, themselves included. All are judged at
    once. A team whose opponents are gone wins: 1 for team 0, -1 for team 1, 0 if both are gone.
    opponent: `shortest` or `random`.
    """

    def __init__(
        self, graph: Graph, device, *, team_size=2, opponent="shortest", horizon: int = 64
    ):
        if graph.num_nodes < 2 * team_size:
            raise ValueError(
                f"{graph.name} has {graph.num_nodes} nodes, {2 * team_size} players need one each."
            )
        self.opponent = opponent
        super().__init__(graph, device, (team_size, team_size), horizon)

    def settle(self, positions: Tensor) -> Tensor:
        """Removes the outnumbered. (B,P) -> (B,P)"""
        hops = self.graph.distances[positions[:, :, None], positions[:, None]]  # (B,P,P)
        near = hops <= 1  # false for the removed
        team = torch.arange(self.num_players, device=self.device) < self.teams[0]  # (P,)
        mates = team[:, None] == team  # (P,P)
        outnumbered = (near & ~mates).sum(-1) > (near & mates).sum(-1)  # (B,P)
        return positions.masked_fill(outnumbered, -1)

    def outcome(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards of team 0 (B,), terminated (B,) of positions (B,P) after settle()."""
        first, second = positions.split(self.teams, 1)  # (B,k) each
        lost = (first < 0).all(1)  # (B,)
        won = (second < 0).all(1)  # (B,)
        return won.float() - lost.float(), lost | won

    def find_starts(self, generator: torch.Generator) -> Tensor:
        """Random layouts: one player after another, the teams in turns, is placed on a free node
        more than 2 hops from every opponent, or as far as can be. -> (DRAWN_STARTS,P)"""
        n = self.graph.num_nodes
        k = self.teams[0]
        places = torch.full((DRAWN_STARTS, 2 * k), -1)  # (S,P)
        order = [side * k + number for number in range(k) for side in (0, 1)]
        for count, player in enumerate(order):
            opponents = places[:, k:] if player < k else places[:, :k]  # (S,k)
            gaps = least(self.graph.distances[opponents][..., :n], 1).clamp(max=3)  # (S,n)
            gaps.scatter_(1, places[:, order[:count]], -1)  # these nodes are taken
            places[:, player] = random_argmax(gaps, generator)[:, 0]
        return places

    def answer(self, moved: Tensor) -> Tensor:
        """Slots (E,k) of the scripted opponents, who do not see `moved` (E,k)."""
        return self.scripted(self.opponent, self.positions, 1)

    def scripted(self, kind: str, positions: Tensor, side: int = 0) -> Tensor:
        """Slots (B,k) of `side` at positions (B,P): `shortest` path to the nearest opponent left,
        `random`, `noisy` (shortest, random with chance 1/2)."""
        if kind not in ("shortest", "random", "noisy"):
            raise ValueError(f"Confrontation has no script {kind!r}: only pursuit is solved.")
        others, own = self.view(positions, side).split(self.teams, 1)  # (B,k) each
        if kind == "random":
            return self.random_slots(own)
        slots = self.nearest_slots(own, others)  # (B,k)
        return slots if kind == "shortest" else self.noisy(own, slots)


def random_argmax(values: Tensor, generator: torch.Generator) -> Tensor:
    """The index of the largest of whole numbers, any one of them if there are several.

    (S,n) -> (S,1)
    """
    return (values + torch.rand(values.shape, generator=generator)).argmax(1, keepdim=True)
