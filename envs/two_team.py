"""Zero-sum games of two teams that can be solved exactly: tables of rewards and transitions, batched in torch.

Players 0..n-1 are the protagonists, who want the reward, players n..n+m-1 the antagonists, who want its negative. One
step moves all E games at once. A game that ended begins anew in the same step; `last` tells what it looked like before.
"""

import math

import torch
from torch import Tensor

MATRIX_GAMES = {  # protagonists' payoff, one dimension a player: antagonists stand behind protagonists
    "additive": [[[[-2, 0], [-3, -1]], [[-3, -1], [-4, -2]]], [[[0, 2], [-1, 1]], [[-1, 1], [-2, 0]]]],
    "product": [[[[0, -1], [-1, -3]], [[2, 1], [1, -1]]], [[[2, 1], [1, -1]], [[8, 7], [7, 5]]]],  # p1 p2 - h1 h2
    "pennies": [[1, -1], [-1, 1]],
    "rock_paper_scissors": [[0, -1, 1], [1, 0, -1], [-1, 1, 0]],
    "saddle": [[4, 1, 3], [2, 0, 1], [5, -1, 0]],  # a saddle point, but no dominant action
}
CLIMBING = torch.tensor([[8, -12, -12], [-12, 0, 0], [-12, 0, 0]])  # M: the worst surrounds the best
MATRIX_GAMES["climbing"] = (CLIMBING[:, :, None, None] - CLIMBING).tolist()  # M[a] - M[b]
SMALL_ARAT = {  # three states, two against two, two actions; discount 0.9
    "pro_rewards": [[[1, 0], [0, 2]], [[0, 1], [1, 0]], [[2, 0], [0, 0]]],  # (S,n,K)
    "ant_rewards": [[[0, 1], [1, 0]], [[2, 0], [0, 1]], [[0, 0], [1, 3]]],  # (S,m,K), what protagonists lose
    "base": [[0.4, 0.3, 0.3], [0.3, 0.4, 0.3], [0.3, 0.3, 0.4]],  # (S,S)
    "pro_shifts": [[[0, 0, 0], [0.1, -0.1, 0]], [[0, 0, 0], [0, 0.1, -0.1]]],  # (n,K,S) added to a row of base
    "ant_shifts": [[[0, 0, 0], [-0.1, 0, 0.1]], [[0, 0, 0], [0, -0.1, 0.1]]],  # (m,K,S)
}


def add_players(terms: list[Tensor]) -> Tensor:
    """Sum of terms, one for each player, over all joint actions. Each (S,K,...) -> (S,K,K,..,K,...), K^players"""
    total = terms[0]
    for number, term in enumerate(terms[1:], 1):
        total = total.unsqueeze(number + 1) + term.view(len(term), *[1] * number, *term.shape[1:])
    return total


def matrix_game(name: str) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Rewards (1,A,B), transitions (1,A,B,1) that are zero because the game ends, and (n, m)."""
    payoff = torch.tensor(MATRIX_GAMES[name], dtype=torch.float64)
    n = payoff.dim() // 2
    rewards = payoff.reshape(1, payoff.size(0) ** n, -1)  # (1,A,B)
    return rewards, torch.zeros(*rewards.shape, 1, dtype=torch.float64), (n, n)


def arat_game(size: str, seed: int = 0) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Additive rewards, additive transitions: rewards (S,A,B), transitions (S,A,B,S), (n, m); joint actions flattened.

    `small` has 3 states, 2 against 2 and 2 actions. `large` has 50, 3 against 3 and 4, drawn from a seed: every player
    moves the game by a sixth to where its own action leads. Utilities of single players describe such games exactly.
    """
    if size == "small":
        table = {name: torch.tensor(values, dtype=torch.float64) for name, values in SMALL_ARAT.items()}
        states, n, m = 3, 2, 2
        rewards = [*table["pro_rewards"].unbind(1), *(-table["ant_rewards"]).unbind(1)]  # (S,K) each
        moves = [
            shift.expand(states, -1, -1) for key in ("pro_shifts", "ant_shifts") for shift in table[key]
        ]  # (S,K,S)
        moves[0] = moves[0] + table["base"][:, None]
    else:
        generator, (states, n, m, actions) = torch.Generator().manual_seed(seed), (50, 3, 3, 4)
        draw = {"generator": generator, "dtype": torch.float64}
        rewards = [torch.randn(states, actions, **draw) for _ in range(n + m)]
        moves = [(4 * torch.randn(states, actions, states, **draw)).softmax(-1) / (n + m) for _ in range(n + m)]
    rewards, moves = add_players(rewards), add_players(moves)  # (S,K,..,K), (S,K,..,K,S)
    pro, ant = math.prod(rewards.shape[1 : n + 1]), math.prod(rewards.shape[n + 1 :])
    return rewards.reshape(states, pro, ant), moves.reshape(states, pro, ant, states), (n, m)


def best_response(rewards: Tensor, transitions: Tensor, gamma: float) -> Tensor:
    """Value of the best policy of one player, by policy iteration. (S,A), (S,A,S) -> (S,)"""
    states, values = torch.arange(len(rewards)), rewards.new_zeros(len(rewards))  # (S,) each
    identity = torch.eye(len(rewards), dtype=rewards.dtype)  # (S,S)
    while True:
        best = (rewards + gamma * transitions @ values).argmax(1)  # (S,)
        previous, values = (
            values,
            torch.linalg.solve(identity - gamma * transitions[states, best], rewards[states, best]),
        )
        if (values - previous).abs().max() <= 1e-11 * (1 + values.abs().max()):
            return values


def minimax_values(rewards: Tensor, transitions: Tensor, gamma: float) -> Tensor:
    """Values of pure minimax play: antagonists improve against best answers until they cannot. (S,A,B) -> (S,)

    As if protagonists saw what antagonists do: a game with turns, in which this strategy iteration is exact.
    """
    states, values = torch.arange(len(rewards)), rewards.new_zeros(len(rewards))  # (S,) each
    while True:
        ant = (rewards + gamma * transitions @ values).amax(1).argmin(1)  # (S,)
        previous, values = values, best_response(rewards[states, :, ant], transitions[states, :, ant], gamma)
        if (values - previous).abs().max() <= 1e-11 * (1 + values.abs().max()):
            return values


def joint_actions(actions: Tensor, teams: tuple[int, int], num_actions: int) -> list[Tensor]:
    """Numbers of both teams' joint actions, the first player's digit in front. (B,n+m) -> (B,), (B,)"""
    parts = actions.split(teams, 1)  # (B,n), (B,m)
    powers = [num_actions ** torch.arange(size - 1, -1, -1, device=actions.device) for size in teams]
    return [(part * power).sum(1) for part, power in zip(parts, powers)]


class TabularGame:
    """E copies of a game given by tables; players see the state as one of S."""

    def __init__(
        self, rewards: Tensor, transitions: Tensor, teams: tuple[int, int], num_envs: int, seed: int, device, horizon=20
    ):
        """`horizon`: steps after which a game that does not end by itself is cut off and begins in a random state."""
        self.rewards, self.ends = rewards.float().to(device), transitions.sum(-1).to(device) < 0.5  # (S,A,B) each
        self.ladders = transitions.cumsum(-1).float().to(device)  # (S,A,B,S)
        self.teams, self.horizon, self.num_envs, self.device = teams, horizon, num_envs, torch.device(device)
        self.num_actions = round(rewards.size(1) ** (1 / teams[0]))
        self.observation_dim = self.state_dim = len(rewards)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.states = self.draw_states()  # (E,)
        self.clock = torch.arange(num_envs, device=device) % horizon  # (E,) staggered, so that cuts come evenly

    def draw_states(self) -> Tensor:
        """Random states (E,)."""
        return torch.randint(len(self.rewards), (self.num_envs,), generator=self.generator, device=self.rewards.device)

    def observe(self) -> tuple[Tensor, Tensor]:
        """What players see (E,n+m,O), and the state (E,S): the state's number as a one-hot vector."""
        state = torch.nn.functional.one_hot(self.states, self.state_dim).float()  # (E,S)
        return state[:, None].expand(-1, sum(self.teams), -1), state

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """actions (E,n+m) -> rewards (E,), ends (E,), and what observe() would have said before new games began."""
        place = self.states, *joint_actions(actions, self.teams, self.num_actions)
        rewards, ends = self.rewards[place], self.ends[place]  # (E,) each
        uniform = torch.rand(self.num_envs, 1, generator=self.generator, device=rewards.device)
        self.states = (self.ladders[place] < uniform).sum(1).clamp(max=len(self.rewards) - 1)  # (E,)
        last, self.clock = self.observe(), self.clock + 1
        anew = ends | (self.clock >= self.horizon)  # (E,)
        self.states = torch.where(anew, self.draw_states(), self.states)
        self.clock = self.clock.masked_fill(anew, 0)
        return rewards, ends, last

    def state_dict(self) -> dict:
        """What the next step depends on."""
        return {"states": self.states, "clock": self.clock, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict) -> None:
        """Continue where state_dict was taken."""
        self.states, self.clock = (state[name].to(self.rewards.device) for name in ("states", "clock"))
        self.generator.set_state(state["generator"].cpu())
