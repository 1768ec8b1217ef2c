"""Games on graphs, batched in torch: pursuit of an evader, and confrontation of two teams that outnumber each other.

The rules of pursuit are those of EPG and R2PS (github.com/Cahemgco/EPG_code; arXiv 2511.17367), those of confrontation
are ours. Players stand on nodes, team 0 first in every list; -1 is a removed player. Actions are slots of graphs.py.
Ties go to the first slot, that is to the lowest node, in every argmin and argmax; joint moves count the first pursuer's
slot as the highest digit.
"""

import functools
import math

import torch
from torch import Tensor

from envs.graphs import Graph, capture_tables

LISTED_STARTS, DRAWN_STARTS = 20_000, 2_000  # starts() lists them all up to the first number, else draws the second
TRIES = 8  # layouts drawn for the start of a confrontation, of which the best is taken


def least(hops: Tensor, axis: int) -> Tensor:
    """hops.amin(axis) for an axis of a few players, where torch's own is ten times slower. (..,P,..) -> (..,..)"""
    return functools.reduce(torch.minimum, hops.unbind(axis))


class GraphGame:
    """What both games share: E games of two teams; a game that ended begins anew in the same step."""

    def __init__(self, graph: Graph, num_envs: int, seed: int, device, teams: tuple[int, int], horizon: int):
        """`horizon`: steps after which a game is cut off (truncated, not terminated)."""
        self.graph, self.num_envs, self.device = graph.to(device), num_envs, torch.device(device)
        self.teams, self.num_players, self.horizon = teams, sum(teams), horizon
        self.generator = torch.Generator(device).manual_seed(seed)
        self.positions = self.draw(num_envs, self.generator)  # (E,P)
        self.steps = torch.zeros(num_envs, dtype=torch.long, device=device)  # (E,)

    def view(self, positions: Tensor, side: int) -> Tensor:
        """Opponents of `side` first, then its own players, in their order. (B,P) -> (B,P)"""
        return torch.cat(positions.split(self.teams, 1)[:: 1 if side else -1], 1)

    def move(self, positions: Tensor, slots: Tensor) -> Tensor:
        """Where the slots lead. (B,p), (B,p) -> (B,p)"""
        if slots.shape != positions.shape:
            raise ValueError(f"Actions have the shape {tuple(slots.shape)}, {tuple(positions.shape)} is needed.")
        if self.graph.slot_mask[positions, slots].any():
            raise ValueError("An action names a padded slot: choose among those where slot_mask is False.")
        return self.graph.slots[positions, slots]

    def step(self, actions: Tensor, opponent_actions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Slots (E,size of team 0), (E,size of team 1) -> rewards (E,), terminated (E,), truncated (E,), last (E,P).

        Without `opponent_actions` team 1 follows its script. Rewards are those of team 0; `last` are the positions
        before new games began. Raises ValueError for padded slots; the removed have slot 0 only.
        """
        mine, theirs = self.positions.split(self.teams, 1)  # (E,size) each
        moved = self.move(mine, actions)  # (E,size of team 0)
        if opponent_actions is None:
            opponent_actions = self.answer(moved)
        last = self.settle(torch.cat([moved, self.move(theirs, opponent_actions)], 1))  # (E,P)
        rewards, terminated = self.outcome(last)  # (E,) each
        self.steps = self.steps + 1
        truncated = (self.steps >= self.horizon) & ~terminated  # (E,)
        anew = terminated | truncated  # (E,)
        self.positions, self.steps = last.clone(), self.steps.masked_fill(anew, 0)
        if anew.any():
            self.positions[anew] = self.draw(int(anew.sum()), self.generator)
        return rewards, terminated, truncated, last

    def settle(self, positions: Tensor) -> Tensor:
        """What is left of the players after a move. (B,P) -> (B,P)"""
        return positions

    def starts(self) -> Tensor:
        """Random starts (DRAWN_STARTS,P), the same for every seed of the game; GPUs draw others than CPUs."""
        return self.draw(DRAWN_STARTS, torch.Generator(self.device).manual_seed(0))

    def random_slots(self, positions: Tensor) -> Tensor:
        """Uniform among the allowed slots, by the game's generator. (B,p) -> (B,p)"""
        uniform = torch.rand(positions.shape, generator=self.generator, device=self.device)  # (B,p)
        return (uniform * (~self.graph.slot_mask[positions]).sum(-1)).long()

    def nearest_slots(self, positions: Tensor, targets: Tensor) -> Tensor:
        """One step on a shortest path to the nearest of the targets that is not removed. (B,p), (B,q) -> (B,p)"""
        nodes = self.graph.slots[positions]  # (B,p,K)
        hops = least(self.graph.distances[nodes[..., None], targets[:, None, None]], -1)  # (B,p,K)
        return hops.masked_fill(self.graph.slot_mask[positions], 3 * self.graph.diameter).argmin(-1)

    def noisy(self, positions: Tensor, slots: Tensor) -> Tensor:
        """Every player takes a random slot with chance 1/2. (B,p), (B,p) -> (B,p)"""
        keep = torch.rand(slots.shape, generator=self.generator, device=self.device) < 0.5  # (B,p)
        return torch.where(keep, slots, self.random_slots(positions))

    def picture(self, positions: Tensor) -> Tensor:
        """Positions (P,) as bytes (320,320,3): the graph in grey, team 0 blue, team 1 orange, the removed left out."""
        return self.graph.picture(positions, self.teams[0])

    def state_dict(self) -> dict:
        """What the next step depends on."""
        return {"positions": self.positions, "steps": self.steps, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict) -> None:
        """Continue where state_dict was taken."""
        self.positions, self.steps = (state[name].to(self.device) for name in ("positions", "steps"))
        self.generator.set_state(state["generator"].cpu())


class GraphPursuit(GraphGame):
    """Pursuers, team 0, who win 1 when `num_captors` of them are on or next to the evader's node after a step.

    evader: `dp` (argmax of the worst-case steps to capture, over the pursuers' best joint move), `maxdist` (argmax of
    the hops to the nearest pursuer), `random`, `stay`, or `learned` (actions come with step). All move at once;
    `asynchronous` lets the scripted evader see the pursuers' new nodes. start: `same` node for all pursuers, `far` (the
    same, more than 5 hops from the evader or else the diameter), `independent` nodes. Nobody is captured at the start.
    """

    EVADERS = ("dp", "maxdist", "random", "stay")

    def __init__(
        self,
        graph: Graph,
        num_envs: int,
        seed: int,
        device,
        *,
        num_pursuers: int = 2,
        num_captors: int = 1,
        evader: str = "maxdist",
        asynchronous: bool = False,
        start: str = "same",
        horizon: int = 128,
    ):
        if evader not in (*self.EVADERS, "learned"):
            raise ValueError(f"No evader {evader!r}: choose one of {', '.join(self.EVADERS)}, learned.")
        if start not in ("same", "far", "independent"):
            raise ValueError(f"No start {start!r}: choose one of same, far, independent.")
        if not 1 <= num_captors <= num_pursuers:
            raise ValueError(f"num_captors={num_captors} must be from 1 to num_pursuers={num_pursuers}.")
        if graph.diameter < 2:
            raise ValueError(f"{graph.name} has no start at which the evader is not captured.")
        self.num_captors, self.evader, self.asynchronous, self.start = num_captors, evader, asynchronous, start
        super().__init__(graph, num_envs, seed, device, (num_pursuers, 1), horizon)

    def outcome(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards of the pursuers (B,), terminated (B,) of positions (B,P)."""
        near = self.graph.distances[positions[:, :-1], positions[:, -1:]] <= 1  # (B,m)
        captured = near.sum(1) >= self.num_captors  # (B,)
        return captured.float(), captured

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Uniform among the starts of the rule. -> (count,P)"""
        n, m = self.graph.num_nodes, self.teams[0]
        if self.start != "independent":
            pairs = self.pairs()  # (pairs,2)
            chosen = torch.randint(len(pairs), (count,), generator=generator, device=self.device)  # (count,)
            return pairs[chosen][:, [0] * m + [1]]
        # Too many states to list: first the evader's node and who is near it, weighted by the states it stands for
        near = self.graph.distances[:n, :n] <= 1  # (n,n)
        patterns = torch.cartesian_prod(*[torch.arange(2, device=self.device)] * m).view(-1, m).bool()  # (2^m,m)
        patterns = patterns[patterns.sum(1) < self.num_captors]  # (L,m)
        sizes = near.sum(1).double()[:, None, None]  # (n,1,1)
        weights = torch.where(patterns, sizes, n - sizes).prod(-1).flatten()  # (n*L,)
        cells = torch.multinomial(weights, count, replacement=True, generator=generator)  # (count,)
        evaders, wanted = cells // len(patterns), patterns[cells % len(patterns)]  # (count,), (count,m)
        allowed = (near[evaders][:, None] == wanted[..., None]).float().flatten(0, 1)  # (count*m,n)
        return torch.cat([torch.multinomial(allowed, 1, generator=generator).view(count, m), evaders[:, None]], 1)

    def pairs(self) -> Tensor:
        """Nodes of the pursuers and of the evader for starts on one node. -> (pairs,2)"""
        least = min(5, self.graph.diameter - 1) if self.start == "far" else 1
        return (self.graph.distances[:-1, :-1] > least).nonzero()

    def starts(self) -> Tensor:
        """All starts of the rule, in order, if they are not too many to list, else random ones. -> (count,P)"""
        n, m = self.graph.num_nodes, self.teams[0]
        if self.start != "independent":
            states = self.pairs()[:, [0] * m + [1]]  # (count,P)
        elif n ** (m + 1) <= 50 * LISTED_STARTS:
            states = torch.cartesian_prod(*[torch.arange(n, device=self.device)] * (m + 1))  # (n^P,P)
            states = states[~self.outcome(states)[1]]  # (count,P)
        else:
            return super().starts()
        return states if len(states) <= LISTED_STARTS else super().starts()

    def answer(self, moved: Tensor) -> Tensor:
        """Slots (E,1) of the scripted evader, when the pursuers move to `moved` (E,m)."""
        if self.evader == "learned":
            raise ValueError("A learned evader does not move by itself: give step its opponent_actions.")
        seen = moved if self.asynchronous else self.positions[:, :-1]  # (E,m)
        return self.scripted(self.evader, torch.cat([seen, self.positions[:, -1:]], 1), 1)

    def scripted(self, kind: str, positions: Tensor, side: int = 0) -> Tensor:
        """Slots of a script at positions (B,P) -> (B,m) or, for side 1, (B,1).

        side 0: `shortest` path to the evader, `dp` (joint argmin of the worst steps to capture), `noisy` (dp, random
        with chance 1/2), `random`. side 1: the evaders; in an asynchronous game pursuers stand on their new nodes.
        """
        own = positions.split(self.teams, 1)[side]  # (B,size)
        if kind not in (self.EVADERS if side else ("shortest", "dp", "noisy", "random")):
            raise ValueError(f"Side {side} has no script {kind!r}.")
        if kind == "random":
            return self.random_slots(own)
        if kind == "shortest":
            return self.nearest_slots(own, positions[:, -1:])
        if not side:
            slots = self.best_slots(positions)  # (B,m)
            return slots if kind == "dp" else self.noisy(own, slots)
        nodes, closed = self.graph.slots[own[:, 0]], self.graph.slot_mask[own[:, 0]]  # (B,K) each
        pursuers = positions[:, :-1, None]  # (B,m,1)
        if kind == "stay":
            values = (nodes == own).float()  # (B,K)
        elif kind == "maxdist":
            values = least(self.graph.distances[nodes[:, None], pursuers], 1)  # (B,K)
        else:
            times, _, best = capture_tables(self.graph, self.teams[0], self.num_captors)  # (n,..,n) each
            values = (times if self.asynchronous else best)[(*pursuers.unbind(1), nodes)]  # (B,K)
        return values.masked_fill(closed, -1).argmax(1, keepdim=True)

    def best_slots(self, positions: Tensor) -> Tensor:
        """Joint move with the least worst case of the steps to capture. (B,P) -> (B,m)"""
        m, K = self.teams[0], self.graph.num_slots
        worst = capture_tables(self.graph, m, self.num_captors)[1]  # (n,..,n)
        views = [(-1, *(K if axis == pursuer else 1 for axis in range(m))) for pursuer in range(m)]
        nodes = [self.graph.slots[place].view(view) for place, view in zip(positions.T, views)]  # (B,..,K,..) each
        closed = [self.graph.slot_mask[place].view(view) for place, view in zip(positions.T, views)]
        values = worst[(*nodes, positions[:, -1].view(-1, *[1] * m))]  # (B,K,..,K)
        joint = values.masked_fill(functools.reduce(torch.logical_or, closed), math.inf).flatten(1).argmin(1)  # (B,)
        return torch.stack([joint // K ** (m - 1 - pursuer) % K for pursuer in range(m)], 1)


class GraphConfrontation(GraphGame):
    """Two teams of k (rules ours): after a move, players are removed whom opponents within one hop outnumber.

    Their own side counts who is within one hop of them, themselves included. All are judged at once. A team whose
    opponents are gone wins: 1 for team 0, -1 for team 1, 0 if both are gone. opponent: `shortest` or `random`.
    """

    def __init__(
        self, graph: Graph, num_envs: int, seed: int, device, *, team_size=2, opponent="shortest", horizon: int = 64
    ):
        if opponent not in ("shortest", "random"):
            raise ValueError(f"No opponent {opponent!r}: choose one of shortest, random.")
        if graph.num_nodes < 2 * team_size:
            raise ValueError(f"{graph.name} has {graph.num_nodes} nodes, {2 * team_size} players need one each.")
        self.opponent = opponent
        super().__init__(graph, num_envs, seed, device, (team_size, team_size), horizon)

    def settle(self, positions: Tensor) -> Tensor:
        """Removes the outnumbered. (B,P) -> (B,P)"""
        near = self.graph.distances[positions[:, :, None], positions[:, None]] <= 1  # (B,P,P) false for the removed
        team = torch.arange(self.num_players, device=self.device) < self.teams[0]  # (P,)
        mates = team[:, None] == team  # (P,P)
        return positions.masked_fill((near & ~mates).sum(-1) > (near & mates).sum(-1), -1)

    def outcome(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards of team 0 (B,), terminated (B,) of positions (B,P) from which the outnumbered are removed."""
        lost, won = ((part < 0).all(1) for part in positions.split(self.teams, 1))  # (B,) each
        return won.float() - lost.float(), lost | won

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Distinct nodes, more than 2 hops from every opponent, or as far as the best of TRIES has it. -> (count,P)"""
        n, k = self.graph.num_nodes, self.teams[0]
        places = torch.full((count * TRIES, 2 * k), -1, device=self.device)  # (count*TRIES,P)
        for player in (side * k + number for number in range(k) for side in (0, 1)):
            opponents = places.split(k, 1)[player < k]  # (count*TRIES,k)
            gaps = least(self.graph.distances[opponents][..., :n], 1).clamp(max=3)  # (count*TRIES,n)
            taken = (places[..., None] == torch.arange(n, device=self.device)).any(1)  # (count*TRIES,n)
            gaps = gaps.masked_fill(taken, -1)
            best = (gaps == gaps.amax(1, keepdim=True)).float()  # (count*TRIES,n)
            places[:, player] = torch.multinomial(best, 1, generator=generator)[:, 0]
        gaps = self.graph.distances[places[:, :k, None], places[:, None, k:]].flatten(1).amin(1)  # (count*TRIES,)
        chosen = gaps.clamp(max=3).view(count, TRIES).argmax(1)  # (count,)
        return places.view(count, TRIES, -1)[torch.arange(count, device=self.device), chosen]

    def answer(self, moved: Tensor) -> Tensor:
        """Slots (E,k) of the scripted opponents, who do not see `moved` (E,k)."""
        return self.scripted(self.opponent, self.positions, 1)

    def scripted(self, kind: str, positions: Tensor, side: int = 0) -> Tensor:
        """Slots (B,k) of `side` at positions (B,P): `shortest` path to the nearest opponent left, `random`, `noisy`."""
        if kind not in ("shortest", "random", "noisy"):
            raise ValueError(f"Side {side} has no script {kind!r}.")
        own, others = positions.split(self.teams, 1)[:: -1 if side else 1]  # (B,k) each
        if kind == "random":
            return self.random_slots(own)
        slots = self.nearest_slots(own, others)  # (B,k)
        return slots if kind == "shortest" else self.noisy(own, slots)
