"""Graphs that games are played on: hops, moves, pictures, and how long pursuers need to capture an
evader.

An action is a slot of a node's closed neighbourhood: to stay, or to cross one edge. Nodes with
fewer neighbours than others have padded slots, which stay too. A removed player has position -1,
which selects the last row of a graph's tables: one slot, that leads to -1 again.
"""

import copy
import functools
import math
import re
from pathlib import Path

import torch
from torch import Tensor

MOST_NODES = 10_000  # distances are a matrix
MOST_STATES = 10**8  # of capture_times(), which keeps a few numbers for each
SIZE = 320  # of a picture, in pixels
MARGIN = 30
COLOURS = (40, 110, 230), (240, 120, 20)  # team 0 blue, team 1 orange


class Graph:
    """A connected graph: tables for n nodes, K slots; row n (or -1) stands for a removed player.

    slots (n+1,K) are the nodes that a slot leads to, in increasing order; slot_mask (n+1,K) is True
    where padded; log_slots (n+1,) is the entropy of a uniform choice among the open slots;
    distances (n+1,n+1) are hops, 2 * diameter to a removed player.
    """

    def __init__(self, name: str, edges: Tensor, coordinates: Tensor, num_slots: int = 0):
        """edges (M,2), coordinates (n,2). `num_slots`: K, 0 for as many as the graph needs."""
        n = len(coordinates)
        near = [{node} for node in range(n)]  # a node is next to itself: players may stay
        for a, b in edges.tolist():
            near[a].add(b)
            near[b].add(a)
        sizes = torch.tensor([len(nodes) for nodes in near] + [1])  # (n+1,)
        K = num_slots or int(sizes.max())
        rows = [sorted(nodes) + [node] * (K - len(nodes)) for node, nodes in enumerate(near)]
        self.name = name
        self.num_nodes = n
        self.num_slots = K
        self.edges = edges
        self.slots = torch.tensor(rows + [[-1] * K])  # (n+1,K)
        self.slot_mask = torch.arange(K) >= sizes[:, None]  # (n+1,K)
        self.log_slots = sizes.log()  # (n+1,)
        hops = count_hops(self.slots[:n], name)  # (n,n)
        self.diameter = int(hops.max())
        self.distances = hops.new_full((n + 1, n + 1), 2 * self.diameter)  # (n+1,n+1)
        self.distances[:n, :n] = hops
        low = coordinates.amin(0)  # (2,)
        high = coordinates.amax(0)  # (2,)
        centred = coordinates - (low + high) / 2  # (n,2)
        self.coordinates = (centred / (high - low).max() + 0.5).float()  # (n,2), in the unit square
        self.tables = {}  # of capture_tables(), which games on this graph share
        self.canvas = None  # the picture without players

    def to(self, device) -> "Graph":
        """This graph, or a copy with its tables on another device."""
        if self.slots.device == torch.device(device):
            return self
        moved = copy.copy(self)
        for name in ("distances", "slots", "slot_mask", "log_slots"):
            setattr(moved, name, getattr(self, name).to(device))
        moved.tables = {}
        for key, tables in self.tables.items():
            moved.tables[key] = tuple(table.to(device) for table in tables)
        return moved

    def features(self, positions: Tensor) -> Tensor:
        """Hops from every node to every player over the diameter, 2 for removed players.

        (B,P) -> (B,n,P) float32
        """
        return self.distances[positions][..., :-1].transpose(1, 2) / self.diameter

    def picture(self, positions: Tensor, first_team: int) -> Tensor:
        """The graph in grey, the first players of positions (P,) blue, the others orange.

        -> (320,320,3) bytes
        """
        spots = self.coordinates * (SIZE - 2 * MARGIN) + MARGIN  # (n,2) x, y
        if self.canvas is None:
            self.canvas = torch.full((SIZE, SIZE, 3), 255.0)  # (H,W,3)
            for a, b in self.edges.tolist():
                paint(self.canvas, spots[a], spots[b], 1.0, (190, 190, 190))
            for spot in spots:
                paint(self.canvas, spot, spot, 3.5, (110, 110, 110))
        picture = self.canvas.clone()
        nodes = positions.tolist()
        for player, node in enumerate(nodes):
            if node < 0:
                continue
            spot = spots[node]
            here = [other for other, place in enumerate(nodes) if place == node]
            if len(here) > 1:
                spot = spot + ring(len(here), 8.0)[here.index(player)]
            paint(picture, spot, spot, 9.0, (255, 255, 255))
            paint(picture, spot, spot, 7.5, COLOURS[player >= first_team])
        return picture.round().byte()


def count_hops(slots: Tensor, name: str) -> Tensor:
    """Hops between all nodes, by a breadth-first search from all at once. (n,K) -> (n,n) int16"""
    reached = torch.eye(len(slots), dtype=torch.bool)  # (n,n)
    hops = torch.zeros(reached.shape, dtype=torch.int16)
    while not reached.all():
        hops += ~reached
        before = reached.clone()
        for column in slots.T:
            reached |= before[column]
        if torch.equal(before, reached):
            raise ValueError(f"{name} is not connected.")
    return hops


def paint(picture: Tensor, start: Tensor, end: Tensor, radius: float, colour: tuple) -> None:
    """A line of width 2 * radius with round ends, or a disk where they are the same.

    picture (H,W,3), start and end (2,)
    """
    rows = torch.arange(picture.shape[0])
    columns = torch.arange(picture.shape[1])
    grid = torch.meshgrid(columns, rows, indexing="xy")  # (H,W) each
    pixels = torch.stack(grid, -1).float() - start  # (H,W,2)
    along = end - start  # (2,)
    share = (pixels @ along) / along.square().sum().clamp(min=1e-9)  # (H,W) of the way to the end
    gaps = (pixels - share.clamp(0, 1)[..., None] * along).norm(dim=-1)  # (H,W)
    cover = (radius + 0.5 - gaps).clamp(0, 1)[..., None]  # (H,W,1)
    picture.lerp_(torch.tensor(colour).float().expand_as(picture), cover.expand_as(picture))


def ring(count: int, radius: float = 1.0) -> Tensor:
    """Points on a circle, the first on top. -> (count,2)"""
    angles = torch.arange(count) * 2 * math.pi / count  # (count,)
    return radius * torch.stack([angles.sin(), -angles.cos()], 1)


# --- Kinds of graphs ----------------------------------------------------------------------------


def gabriel_edges(points: Tensor) -> Tensor:
    """Pairs (M,2) without another of the points (n,2) in the circle whose diameter is the pair.

    Gabriel 1969. Such graphs are planar and connected, and random ones have nearly 4 edges a node,
    as street maps do. They are the Delaunay edges that face no obtuse angle.
    """
    try:
        from scipy.spatial import Delaunay
    except ImportError:
        raise ValueError("city graphs need scipy: pip install scipy") from None
    n = len(points)
    triangles = torch.from_numpy(Delaunay(points.numpy()).simplices).long()  # (T,3)
    edges = []
    obtuse = []
    for corner in range(3):
        a, b, c = triangles.roll(corner, 1).T  # (T,) each
        cosines = ((points[b] - points[a]) * (points[c] - points[a])).sum(1)  # sign of the angle's
        facing = torch.minimum(b, c) * n + torch.maximum(b, c)  # (T,) a number for each edge
        edges.append(facing)
        obtuse.append(facing[cosines < 0])
    edges = torch.cat(edges).unique()
    edges = edges[~torch.isin(edges, torch.cat(obtuse))]
    return torch.stack([edges // n, edges % n], 1)


def read_graphml(path: str, num_slots: int) -> Graph:
    """The largest connected component of a GraphML file; directions and weights are ignored.

    Nodes keep the order of the file. Attributes x and y, as OSMnx writes them, serve pictures.
    """
    try:
        import networkx
    except ImportError:
        raise ValueError(f"{path}: GraphML needs networkx: pip install networkx") from None
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    try:
        graph = networkx.Graph(networkx.read_graphml(path))
    except Exception as error:  # of the XML parser or of networkx
        raise ValueError(f"{path}: not a GraphML file ({error})") from None
    component = max(networkx.connected_components(graph), key=len, default=())
    nodes = [node for node in graph if node in component]
    if not 2 <= len(nodes) <= MOST_NODES:
        raise ValueError(f"{path}: {len(nodes)} connected nodes; 2 to {MOST_NODES} are possible")
    number = {node: i for i, node in enumerate(nodes)}
    edges = torch.tensor([[number[a], number[b]] for a, b in graph.edges(nodes)])  # (M,2)
    coordinates = ring(len(nodes))
    if all("x" in graph.nodes[node] and "y" in graph.nodes[node] for node in nodes):
        spots = [[float(graph.nodes[node][axis]) for axis in "xy"] for node in nodes]
        coordinates = torch.tensor(spots, dtype=torch.float64) * torch.tensor([1.0, -1.0])
    return Graph(Path(path).stem, edges, coordinates, num_slots)


@functools.cache  # with its tables of capture times, which every new game would compute again
def make_graph(name: str, num_slots: int = 0) -> Graph:
    """cycle_N, path_N, complete_N, grid_RxC (node = row * C + column), petersen, city_N,
    city_N_SEED, or FILE.graphml.

    `num_slots`: K, to which slots are padded; 0 for as many as the graph needs.
    """
    if name.endswith(".graphml"):
        return read_graphml(name, num_slots)
    forms = r"(cycle|path|complete)_\d+|grid_\d+x\d+|petersen|city_\d+(_\d+)?"
    kind = name.split("_")[0]
    sizes = [int(number) for number in re.findall(r"\d+", name)]
    n = math.prod(sizes) if kind == "grid" else sum(sizes[:1])
    smallest = {"cycle": 3, "path": 2, "complete": 2, "grid": 2, "city": 3, "petersen": 0}
    if not re.fullmatch(forms, name, re.ASCII) or not smallest[kind] <= n <= MOST_NODES:
        known = "cycle_8, path_5, complete_4, grid_6x6, petersen, city_60 or city_60_3 (seed 3)"
        raise ValueError(
            f"No graph {name!r}: names have the forms {known} or FILE.graphml, with at most "
            f"{MOST_NODES} nodes."
        )
    line = torch.arange(n)  # (n,)
    if kind == "cycle":
        return Graph(name, torch.stack([line, (line + 1) % n], 1), ring(n), num_slots)
    if kind == "complete":
        return Graph(name, torch.combinations(line), ring(n), num_slots)
    if kind == "petersen":
        rim = torch.arange(5)  # (5,) outer nodes 0-4, inner nodes 5-9
        pairs = [(rim, (rim + 1) % 5), (rim, rim + 5), (rim + 5, (rim + 2) % 5 + 5)]
        edges = torch.cat([torch.stack(pair, 1) for pair in pairs])  # (15,2)
        return Graph(name, edges, torch.cat([ring(5), ring(5, 0.5)]), num_slots)
    if kind == "city":
        generator = torch.Generator().manual_seed(sizes[1] if len(sizes) > 1 else 0)
        points = torch.rand(n, 2, dtype=torch.float64, generator=generator)  # (n,2)
        return Graph(name, gabriel_edges(points), points, num_slots)
    columns = sizes[1] if kind == "grid" else n
    nodes = line.view(-1, columns)  # (rows,columns)
    across = torch.stack([nodes[:, :-1].flatten(), nodes[:, 1:].flatten()], 1)
    down = torch.stack([nodes[:-1].flatten(), nodes[1:].flatten()], 1)
    points = torch.stack([line % columns, line // columns], 1).float()  # (n,2) x, y
    return Graph(name, torch.cat([across, down]), points, num_slots)


# --- Exact solution of pursuit ------------------------------------------------------------------


def over_moves(values: Tensor, graph: Graph, player: int, best) -> Tensor:
    """The best (torch.minimum or maximum) of `values` over what one player can do.

    (n,)*(m+1) -> (n,)*(m+1)
    """
    moved = (values.index_select(player, column) for column in graph.slots[:-1].T)
    return functools.reduce(best, moved)


def capture_times(
    graph: Graph, num_pursuers: int, num_captors: int = 1, on_node: bool = False
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


def capture_tables(
    graph: Graph, num_pursuers: int, num_captors: int
) -> tuple[Tensor, Tensor, Tensor]:
    """capture_times(), its worst over the evader's moves, its best over the pursuers' moves.

    Each (n,)*m x (n,), kept with the graph.
    """
    key = (num_pursuers, num_captors)
    if key not in graph.tables:
        times = capture_times(graph, num_pursuers, num_captors)
        worst = over_moves(times, graph, num_pursuers, torch.maximum)
        best = times
        for pursuer in range(num_pursuers):
            best = over_moves(best, graph, pursuer, torch.minimum)
        graph.tables[key] = (times, worst, best)
    return graph.tables[key]
