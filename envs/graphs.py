"""Graphs by name, which arac.py plays on: cycles, paths, grids, random street maps and others."""

import math
import re

import torch
from torch import Tensor

MOST_NODES = 10_000  # the script keeps a matrix of distances


def ring(count: int, radius: float = 1.0) -> Tensor:
    """Points on a circle, the first on top. -> (count,2)"""
    angles = torch.arange(count) * 2 * math.pi / count  # (count,)
    return radius * torch.stack([angles.sin(), -angles.cos()], 1)


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


def named_graph(name: str) -> tuple[Tensor, Tensor]:
    """Edges (M,2) and coordinates (n,2) of cycle_N, path_N, complete_N, grid_RxC (node = row * C +
    column), petersen, city_N or city_N_SEED."""
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
        return torch.stack([line, (line + 1) % n], 1), ring(n)
    if kind == "complete":
        return torch.combinations(line), ring(n)
    if kind == "petersen":
        rim = torch.arange(5)  # (5,) outer nodes 0-4, inner nodes 5-9
        pairs = [(rim, (rim + 1) % 5), (rim, rim + 5), (rim + 5, (rim + 2) % 5 + 5)]
        edges = torch.cat([torch.stack(pair, 1) for pair in pairs])  # (15,2)
        return edges, torch.cat([ring(5), ring(5, 0.5)])
    if kind == "city":
        generator = torch.Generator().manual_seed(sizes[1] if len(sizes) > 1 else 0)
        points = torch.rand(n, 2, dtype=torch.float64, generator=generator)  # (n,2)
        return gabriel_edges(points), points
    columns = sizes[1] if kind == "grid" else n
    nodes = line.view(-1, columns)  # (rows,columns)
    across = torch.stack([nodes[:, :-1].flatten(), nodes[:, 1:].flatten()], 1)
    down = torch.stack([nodes[:-1].flatten(), nodes[1:].flatten()], 1)
    points = torch.stack([line % columns, line // columns], 1).float()  # (n,2) x, y
    return torch.cat([across, down]), points
