"""Graphs that games are played on: hops, moves, pictures, and how long pursuers need to capture an evader.

An action is a slot of a node's closed neighbourhood: to stay, or to cross one edge. A removed player has position -1,
which selects the last row of a graph's tables: one slot, that leads to -1 again.
"""

import copy
import functools
import math
import re

import torch
from torch import Tensor

MOST_NODES = 10_000  # distances are a matrix
MOST_STATES = 10**8  # of capture_times(), which keeps a few numbers for each
SIZE, MARGIN = 320, 30  # of a picture, in pixels
COLOURS = (40, 110, 230), (240, 120, 20)  # team 0 blue, team 1 orange


class Graph:
    """A connected graph: tables of hops and moves for n nodes, K slots; row n (or -1) stands for a removed player."""

    def __init__(self, name: str, edges: Tensor, coordinates: Tensor, num_slots: int = 0):
        """edges (M,2), coordinates (n,2). `num_slots`: K, 0 for the size of the largest closed neighbourhood."""
        n = len(coordinates)
        adjacent = torch.eye(n, dtype=torch.bool)  # (n,n) a node is next to itself: players may stay
        adjacent[edges[:, 0], edges[:, 1]] = adjacent[edges[:, 1], edges[:, 0]] = True
        degrees = adjacent.sum(1)  # (n,)
        self.name, self.num_nodes, self.num_slots = name, n, num_slots or int(degrees.max())
        if self.num_slots < degrees.max():
            raise ValueError(f"{name} has nodes with {degrees.max()} slots, num_slots={num_slots} are too few.")
        hops, reached = torch.zeros(n, n, dtype=torch.long), torch.eye(n, dtype=torch.bool)  # (n,n) each
        while not reached.all():
            hops += ~reached
            before, reached = reached, (reached.float() @ adjacent.float()) > 0
            if torch.equal(before, reached):
                raise ValueError(f"{name} is not connected.")
        self.diameter = int(hops.max())
        self.distances = torch.full((n + 1, n + 1), 2 * self.diameter)  # (n+1,n+1)
        self.distances[:n, :n] = hops
        self.slot_mask = torch.arange(self.num_slots) >= torch.cat([degrees, torch.ones(1)])[:, None]  # (n+1,K)
        order = torch.where(adjacent, torch.arange(n), n).sort(1).values  # (n,n) neighbours first
        order = torch.nn.functional.pad(order, (0, max(0, self.num_slots - n)))[:, : self.num_slots]  # (n,K)
        self.slots = torch.full((n + 1, self.num_slots), -1)  # (n+1,K)
        self.slots[:n] = order.masked_fill(self.slot_mask[:n], 0)
        self.edge_mask = ~adjacent  # (n,n)
        low, high = coordinates.amin(0), coordinates.amax(0)  # (2,) each
        self.coordinates = ((coordinates - (low + high) / 2) / (high - low).max() + 0.5).float()  # (n,2)
        self.tables = {}  # of capture_tables(), which games on this graph share
        self.canvas = None  # the picture without players

    def to(self, device) -> "Graph":
        """This graph, or a copy with its tables on another device."""
        if self.slots.device == torch.device(device):
            return self
        moved = copy.copy(self)
        for name in ("distances", "slots", "slot_mask", "edge_mask", "coordinates"):
            setattr(moved, name, getattr(self, name).to(device))
        moved.tables = {key: tuple(table.to(device) for table in kept) for key, kept in self.tables.items()}
        return moved

    def features(self, positions: Tensor) -> Tensor:
        """Hops from every node to every player over the diameter, 2 for removed players. (B,P) -> (B,n,P) float32"""
        return self.distances[positions][..., :-1].transpose(1, 2) / self.diameter

    def picture(self, positions: Tensor, first_team: int) -> Tensor:
        """The graph in grey, the first players of positions (P,) blue, the others orange. -> (320,320,3) bytes"""
        spots = self.coordinates.cpu() * (SIZE - 2 * MARGIN) + MARGIN  # (n,2) x, y
        if self.canvas is None:
            self.canvas = torch.full((SIZE, SIZE, 3), 255.0)  # (H,W,3)
            for a, b in (~self.edge_mask).cpu().triu(1).nonzero().tolist():
                paint(self.canvas, spots[a], spots[b], 1.0, (190, 190, 190))
            for spot in spots:
                paint(self.canvas, spot, spot, 3.5, (110, 110, 110))
        picture, nodes = self.canvas.clone(), positions.tolist()
        for player, node in enumerate(nodes):
            if node >= 0:
                here = [other for other, place in enumerate(nodes) if place == node]
                spot = spots[node] + (ring(len(here), 8.0)[here.index(player)] if len(here) > 1 else 0)  # (2,)
                paint(picture, spot, spot, 9.0, (255, 255, 255))
                paint(picture, spot, spot, 7.5, COLOURS[player >= first_team])
        return picture.round().byte()


def paint(picture: Tensor, start: Tensor, end: Tensor, radius: float, colour: tuple[int, int, int]) -> None:
    """A line of width 2 * radius with round ends, or a disk where they are the same. (H,W,3), (2,), (2,)"""
    rows, columns = (torch.arange(size) for size in picture.shape[:2])  # (H,), (W,)
    pixels = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).float() - start  # (H,W,2)
    along = end - start  # (2,)
    share = ((pixels @ along) / along.square().sum().clamp(min=1e-9)).clamp(0, 1)  # (H,W) of the way to the end
    cover = (radius + 0.5 - (pixels - share[..., None] * along).norm(dim=-1)).clamp(0, 1)[..., None]  # (H,W,1)
    picture.lerp_(torch.tensor(colour).float().expand_as(picture), cover.expand_as(picture))


def ring(count: int, radius: float = 1.0) -> Tensor:
    """Points on a circle, the first on top. -> (count,2)"""
    angles = torch.arange(count) * 2 * math.pi / count  # (count,)
    return radius * torch.stack([angles.sin(), -angles.cos()], 1)


def gabriel_edges(points: Tensor) -> Tensor:
    """Pairs (M,2) with no third of the points (n,2) within the circle that has the pair as its diameter (Gabriel 1969).

    Such graphs are planar and connected, and random ones have nearly 4 edges a node, as street maps do.
    """
    squares = (points[:, None] - points).square().sum(-1)  # (n,n)
    others = squares[:, None] + squares  # (n,n,n) i,j,k: from i to k and on to j
    empty = others.amin(2) >= squares  # (n,n) k = i and k = j give the equality
    return empty.triu(1).nonzero()


@functools.cache  # with its tables of capture times, which every new game would compute again
def make_graph(name: str, num_slots: int = 0) -> Graph:
    """cycle_N, path_N, complete_N, grid_RxC (node = row * C + column), petersen, city_N or city_N_SEED.

    `num_slots`: K, to which slots are padded, so that several graphs can share a batch; 0 for the graph's own.
    """
    kind, sizes = name.split("_")[0], [int(number) for number in re.findall(r"\d+", name)]
    forms = r"(cycle|path|complete)_\d+|grid_\d+x\d+|petersen|city_\d+(_\d+)?"
    smallest = {"cycle": 3, "path": 2, "complete": 2, "grid": 2, "city": 2, "petersen": 0}
    nodes = math.prod(sizes if kind == "grid" else sizes[:1])
    if not re.fullmatch(forms, name, re.ASCII) or not smallest[kind] <= nodes <= MOST_NODES:
        known = "cycle_8, path_5, complete_4, grid_6x6, petersen, city_60 or city_60_3 (60 nodes, seed 3)"
        raise ValueError(f"No graph {name!r}: names have the forms {known}, {MOST_NODES} nodes at most.")
    line = torch.arange(nodes)  # (n,)
    if kind == "petersen":
        rim = torch.arange(5)  # (5,) outer nodes 0-4, inner nodes 5-9
        pairs = [(rim, (rim + 1) % 5), (rim, rim + 5), (rim + 5, (rim + 2) % 5 + 5)]
        edges = torch.cat([torch.stack(pair, 1) for pair in pairs])  # (15,2)
        return Graph(name, edges, torch.cat([ring(5), ring(5, 0.5)]), num_slots)
    if kind == "city":
        seed = sizes[1] if len(sizes) > 1 else 0
        points = torch.rand(nodes, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))  # (n,2)
        return Graph(name, gabriel_edges(points), points, num_slots)
    if kind in ("grid", "path"):
        columns = sizes[1] if kind == "grid" else nodes
        points = torch.stack([line % columns, line // columns], 1).float()  # (n,2) x, y
        edges = ((points[:, None] - points).abs().sum(-1) == 1).triu(1).nonzero()  # (M,2)
        return Graph(name, edges, points, num_slots)
    edges = torch.stack([line, (line + 1) % nodes], 1) if kind == "cycle" else torch.combinations(line)  # (M,2)
    return Graph(name, edges, ring(nodes), num_slots)


def over_moves(values: Tensor, graph: Graph, player: int, best) -> Tensor:
    """The best (torch.minimum or maximum) of `values` over what one player can do. (n,)*(m+1) -> (n,)*(m+1)"""
    slots = torch.where(graph.slot_mask, graph.slots[:, :1], graph.slots)[:-1]  # (n,K) the first again as padding
    return functools.reduce(best, (values.index_select(player, move) for move in slots.unique(dim=1).T))


def capture_times(graph: Graph, num_pursuers: int, num_captors: int = 1, on_node: bool = False) -> Tensor:
    """Steps until capture when both sides play best and the evader moves after the pursuers: (n,)*m x (n,), or inf.

    Captured are evaders with `num_captors` pursuers on or next to their node once everybody moved (R2PS lemma 1).
    `on_node`: the classic game of cops and robbers; pursuers catch on the evader's node, also before it moves.
    """
    n, m = graph.num_nodes, num_pursuers
    if n ** (m + 1) > MOST_STATES:
        raise ValueError(f"{graph.name} with {m} pursuers has {n ** (m + 1)} states, too many for exact capture times.")
    near = graph.distances[:n, :n] <= (0 if on_node else 1)  # (n,n)
    views = [near.view([n if axis in (i, m) else 1 for axis in range(m + 1)]).int() for i in range(m)]
    caught = functools.reduce(torch.add, views) >= num_captors  # (n,..,n)
    times = torch.full(caught.shape, math.inf, device=near.device).masked_fill(caught, 0)  # (n,..,n)
    while True:
        values = over_moves(times, graph, m, torch.maximum)  # (n,..,n)
        if on_node:
            values = values.masked_fill(caught, 0)
        for pursuer in range(m):
            values = over_moves(values, graph, pursuer, torch.minimum)
        before, times = times, (1 + values).masked_fill(caught, 0)
        if torch.equal(before, times):
            return times


def capture_tables(graph: Graph, num_pursuers: int, num_captors: int) -> tuple[Tensor, Tensor, Tensor]:
    """capture_times(), its worst over the evader's moves, its best over the pursuers' moves; each (n,)*m x (n,)."""
    key = num_pursuers, num_captors
    if key not in graph.tables:
        times = best = capture_times(graph, *key)
        for pursuer in range(num_pursuers):
            best = over_moves(best, graph, pursuer, torch.minimum)
        graph.tables[key] = times, over_moves(times, graph, num_pursuers, torch.maximum), best
    return graph.tables[key]
