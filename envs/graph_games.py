"""For arac.py: perfect play of pursuit, and the rules of confrontation, a game of two teams that
outnumber each other.

A graph is the table `arac.Graph`, a game is `arac.GraphGame`. Ties go to the first slot, that is to
the lowest node, in every argmin and argmax; joint moves count the first pursuer's slot as the
highest digit.

Letters in shapes: E games, P players of both teams, m pursuers, k players of a team, n nodes, K
slots, B any batch of positions.
"""

import functools
import math

import torch
from torch import Tensor

DRAWN_STARTS = 10_000
MOST_STATES = 10**8  # of capture_times(), which keeps a few numbers for each

# --- Confrontation ------------------------------------------------------------------------------


class Confrontation:
    """Two teams of k (rules ours): after a move, a player is removed if more opponents than team
    mates, itself included, are within one hop.

    All are judged at once. A team whose opponents are gone wins: 1 for team 0, -1 for team 1, 0 if both are gone.
    opponent: `shortest` or `random`. Rules only: arac.py adds them to its GraphGame.
    """

    def __init__(self, graph, device, *, team_size=2, opponent="shortest", horizon: int = 64):
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
            hops = self.graph.distances[opponents][..., :n]  # (S,k,n)
            gaps = functools.reduce(torch.minimum, hops.unbind(1)).clamp(max=3)  # (S,n)
            gaps.scatter_(1, places[:, order[:count]], -1)  # these nodes are taken
            noise = torch.rand(gaps.shape, generator=generator)  # any one of the best
            places[:, player] = (gaps + noise).argmax(1)
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


# --- Perfect play of pursuit --------------------------------------------------------------------


def over_moves(values: Tensor, graph, player: int, best) -> Tensor:
    """The best (torch.minimum or maximum) of `values` over what one player can do.

    (n,)*(m+1) -> (n,)*(m+1)
    """
    moved = (values.index_select(player, column) for column in graph.slots[:-1].T)
    return functools.reduce(best, moved)


def capture_times(
    graph, num_pursuers: int, num_captors: int = 1, on_node: bool = False
) -> Tensor:
    """Steps until capture when both sides play best and the evader moves after the pursuers.

    Captured are evaders with `num_captors` pursuers on or next to their node once everybody moved
    (R2PS lemma 1). `on_node`: the classic game of cops and robbers; pursuers catch on the evader's
    node, also before it moves. -> (n,)*m x (n,), inf where the evader escapes for ever
    """
    n = graph.num_nodes
    m = num_pursuers
    if n ** (m + 1) > MOST_STATES:
        raise ValueError(
            f"{graph.name} with {m} pursuers has {n ** (m + 1)} states, too many for exact "
            "capture times; choose an --evader and a --reference other than dp."
        )
    if n ** (m + 1) > 10**6:
        print(f"{graph.name}: capture times of {n ** (m + 1):,} states, minutes for 10**8", flush=True)
    near = graph.distances[:n, :n] <= (0 if on_node else 1)  # (n,n)
    captors = 0
    for pursuer in range(m):
        shape = [n if axis in (pursuer, m) else 1 for axis in range(m + 1)]
        captors = captors + near.view(shape).int()  # (n,..,n)
    caught = captors >= num_captors  # (n,..,n)
    times = torch.full(caught.shape, math.inf, device=near.device).masked_fill(caught, 0)
    while True:
        values = over_moves(times, graph, m, torch.maximum)  # (n,..,n)
        if on_node:
            values = values.masked_fill(caught, 0)
        for pursuer in range(m):
            values = over_moves(values, graph, pursuer, torch.minimum)
        before = times
        times = (1 + values).masked_fill(caught, 0)
        if torch.equal(before, times):
            return times


@functools.cache
def capture_tables(graph, num_pursuers: int, num_captors: int) -> tuple[Tensor, Tensor, Tensor]:
    """capture_times(), its worst over the evader's moves, its best over the pursuers' moves.

    Each (n,)*m x (n,)
    """
    times = capture_times(graph, num_pursuers, num_captors)
    worst = over_moves(times, graph, num_pursuers, torch.maximum)
    best = times
    for pursuer in range(num_pursuers):
        best = over_moves(best, graph, pursuer, torch.minimum)
    return times, worst, best


def perfect_slots(
    graph, positions: Tensor, side: int, num_captors: int, asynchronous: bool
) -> Tensor:
    """Best slots against the worst that the other side can do: of the m pursuers (side 0), or of
    the evader, who in an asynchronous game sees them on their new nodes. (B,m+1) -> (B,m) or (B,1)
    """
    m = positions.size(1) - 1
    K = graph.num_slots
    times, worst, best = capture_tables(graph, m, num_captors)
    own = positions[:, -1]  # (B,) the evader
    if side:
        table = times if asynchronous else best  # (n,..,n)
        values = table[(*positions[:, :-1, None].unbind(1), graph.slots[own])]  # (B,K)
        return values.masked_fill(graph.slot_mask[own], -1).argmax(1, keepdim=True)
    nodes = []
    closed = torch.zeros((), dtype=torch.bool, device=positions.device)
    for pursuer in range(m):  # pursuer i has the axis i + 1
        shape = [K if axis == pursuer else 1 for axis in range(m)]
        place = positions[:, pursuer]  # (B,)
        nodes.append(graph.slots[place].view(-1, *shape))
        closed = closed | graph.slot_mask[place].view(-1, *shape)  # (B,K,..,K)
    values = worst[(*nodes, own.view(-1, *[1] * m))].masked_fill(closed, math.inf)  # (B,K,..,K)
    joint = values.flatten(1).argmin(1)  # (B,)
    digits = [joint // K ** (m - 1 - pursuer) % K for pursuer in range(m)]
    return torch.stack(digits, 1)
