"""Zero-sum games of two teams that can be solved exactly, given by tables and batched in torch.

Players 0..n-1 are the protagonists, who want the reward; players n..n+m-1 are the antagonists, who
want its negative. S states, A and B joint actions of the two teams, E copies of a game.
"""

import torch
from torch import Tensor

NUM_ACTIONS = 4  # of a player in a random game
MATRIX_GAMES = {  # the protagonists' payoff, a dimension for each player, antagonists last
    "additive": [
        [[[-2, 0], [-3, -1]], [[-3, -1], [-4, -2]]],
        [[[0, 2], [-1, 1]], [[-1, 1], [-2, 0]]],
    ],
    "product": [  # p1 p2 - h1 h2
        [[[0, -1], [-1, -3]], [[2, 1], [1, -1]]],
        [[[2, 1], [1, -1]], [[8, 7], [7, 5]]],
    ],
    "pennies": [[1, -1], [-1, 1]],
    "rock_paper_scissors": [[0, -1, 1], [1, 0, -1], [-1, 1, 0]],
    "saddle": [[4, 1, 3], [2, 0, 1], [5, -1, 0]],  # a saddle point, but no dominant action
}
CLIMBING = torch.tensor(
    [[8, -12, -12], [-12, 0, 0], [-12, 0, 0]]
)  # M: the worst is next to the best
MATRIX_GAMES["climbing"] = (CLIMBING[:, :, None, None] - CLIMBING).tolist()  # M[a] - M[b]
SMALL_ARAT = {  # three states, two against two, two actions; K actions of a player
    "pro_rewards": [[[1, 0], [0, 2]], [[0, 1], [1, 0]], [[2, 0], [0, 0]]],  # (S,n,K)
    "ant_rewards": [[[0, 1], [1, 0]], [[2, 0], [0, 1]], [[0, 0], [1, 3]]],  # (S,m,K), they pay
    "base": [[0.4, 0.3, 0.3], [0.3, 0.4, 0.3], [0.3, 0.3, 0.4]],  # (S,S)
    "pro_shifts": [[[0, 0, 0], [0.1, -0.1, 0]], [[0, 0, 0], [0, 0.1, -0.1]]],  # (n,K,S), on base
    "ant_shifts": [[[0, 0, 0], [-0.1, 0, 0.1]], [[0, 0, 0], [0, -0.1, 0.1]]],  # (m,K,S)
}


def matrix_game(name: str) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Rewards (1,A,B), transitions (1,A,B,1) that are zero because the game ends, and (n, m)."""
    payoff = torch.tensor(MATRIX_GAMES[name], dtype=torch.float64)
    n = payoff.dim() // 2
    rewards = payoff.reshape(1, payoff.size(0) ** n, -1)
    return rewards, torch.zeros_like(rewards)[..., None], (n, n)


def add_players(terms: list[Tensor]) -> Tensor:
    """Sum over players for every joint action. Each (S,K,...) -> (S,K,..,K,...)"""
    total = terms[0]
    for number, term in enumerate(terms[1:], start=1):
        ones = [1] * number
        total = total.unsqueeze(number + 1) + term.view(len(term), *ones, *term.shape[1:])
    return total


def additive_game(
    rewards: list[Tensor], moves: list[Tensor], teams: tuple[int, int]
) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Tables of a game that every player changes by a term of its own: (S,K) and (S,K,S) each."""
    num_states, num_actions = rewards[0].shape
    shape = (num_states, num_actions ** teams[0], num_actions ** teams[1])
    return add_players(rewards).view(shape), add_players(moves).view(*shape, num_states), teams


def arat_game(size: str, seed: int = 0) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Additive rewards, additive transitions: rewards (S,A,B), transitions (S,A,B,S), (n, m).

    `small` has 3 states, 2 against 2 and 2 actions; `large` is random_arat_game with 50 states.
    """
    if size == "large":
        return random_arat_game(50, (3, 3), seed)
    table = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in SMALL_ARAT.items()}
    rewards = torch.cat([table["pro_rewards"], -table["ant_rewards"]], 1)  # (S,N,K)
    shifts = torch.cat([table["pro_shifts"], table["ant_shifts"]])  # (N,K,S)
    moves = [shift.expand(3, -1, -1) for shift in shifts]
    moves[0] = moves[0] + table["base"][:, None]
    return additive_game(list(rewards.unbind(1)), moves, (2, 2))


def random_arat_game(
    num_states: int, teams: tuple[int, int], seed: int
) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """An additive game drawn from a seed: each of N players moves it by 1 / N to where it wants."""
    generator = torch.Generator().manual_seed(seed)
    players = range(sum(teams))
    shape = (num_states, NUM_ACTIONS)
    draw = {"generator": generator, "dtype": torch.float64}
    rewards = [torch.randn(*shape, **draw) for _ in players]
    logits = [4 * torch.randn(*shape, num_states, **draw) for _ in players]
    moves = [x.softmax(-1) / len(players) for x in logits]
    return additive_game(rewards, moves, teams)


def best_response(rewards: Tensor, transitions: Tensor, gamma: float) -> Tensor:
    """Value of the best policy of one player, by policy iteration. (S,A), (S,A,S) -> (S,)"""
    states = torch.arange(len(rewards))
    identity = torch.eye(len(rewards), dtype=rewards.dtype)
    values = rewards.new_zeros(len(rewards))
    while True:
        best = (rewards + gamma * transitions @ values).argmax(1)  # (S,)
        previous = values
        system = identity - gamma * transitions[states, best]
        values = torch.linalg.solve(system, rewards[states, best])
        if torch.allclose(values, previous, rtol=1e-11, atol=1e-11):
            return values


def minimax_values(rewards: Tensor, transitions: Tensor, gamma: float) -> Tensor:
    """Values if protagonists see the antagonists' joint action and answer best. (S,A,B) -> (S,)

    Antagonists play pure, and improve against best answers; for this game with turns it is exact.
    """
    states = torch.arange(len(rewards))
    values = rewards.new_zeros(len(rewards))
    while True:
        ant = (rewards + gamma * transitions @ values).amax(1).argmin(1)  # (S,)
        previous = values
        values = best_response(rewards[states, :, ant], transitions[states, :, ant], gamma)
        if torch.allclose(values, previous, rtol=1e-11, atol=1e-11):
            return values


def joint_actions(actions: Tensor, teams: tuple[int, int], num_actions: int) -> list[Tensor]:
    """Numbers of both teams' joint actions, the first player's digit in front. (B,N) -> (B,), (B,)"""
    numbers = []
    for part in actions.split(teams, 1):
        places = torch.arange(part.size(1) - 1, -1, -1, device=actions.device)
        numbers.append((part * num_actions**places).sum(1))
    return numbers


class TabularGame:
    """E copies of a game given by tables. All players see the state, a one-hot vector.

    A game that does not end by itself is cut off after `horizon` steps. A game that is over begins
    anew, in a random state, in the same step.
    """

    masked = False  # all actions are always legal

    def __init__(
        self,
        rewards: Tensor,
        transitions: Tensor,
        teams: tuple[int, int],
        num_envs: int,
        seed: int,
        device,
        horizon: int = 20,
    ):
        num_states = len(rewards)
        self.teams = teams
        self.num_actions = round(rewards.size(1) ** (1 / teams[0]))
        self.observation_dim = num_states
        self.state_dim = num_states
        self.num_envs = num_envs
        self.horizon = horizon
        self.device = torch.device(device)
        # Tables with a row for each state and joint action: row = number of the state, then digits.
        self.rewards = rewards.flatten().float().to(device)  # (S A B,)
        self.ends = transitions.sum(-1).flatten().to(device) < 0.5  # (S A B,)
        self.ladders = transitions.cumsum(-1).float().view(-1, num_states).to(device)  # (S A B,S)
        self.one_hot = torch.eye(num_states, device=device)
        places = torch.arange(sum(teams), -1, -1, device=device)
        self.digits = self.num_actions**places  # (1+N,)
        self.generator = torch.Generator(device)
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """New games. Their clocks differ, so that cuts come evenly."""
        self.generator.manual_seed(seed)
        self.clock = torch.arange(self.num_envs, device=self.device) % self.horizon  # (E,)
        self.numbers = self.draw_states()  # (E,)
        self.state = self.one_hot[self.numbers]  # (E,S)

    def draw_states(self) -> Tensor:
        """Random states (E,)."""
        size = (self.num_envs,)
        return torch.randint(self.state_dim, size, generator=self.generator, device=self.device)

    def observations(self, state: Tensor) -> Tensor:
        """(B,S) -> (B,1,S): one for all players."""
        return state[:, None]

    def random_actions(self) -> Tensor:
        """(E,N)"""
        size = (self.num_envs, sum(self.teams))
        return torch.randint(self.num_actions, size, generator=self.generator, device=self.device)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """actions (E,N) -> rewards, whether the game ended, and whether it is over, ended or cut
        off, (E,) each; and the state before new games begin (E,S)."""
        rows = (torch.cat([self.numbers[:, None], actions], 1) * self.digits).sum(1)  # (E,)
        rewards = self.rewards[rows]
        dones = self.ends[rows]
        size = (self.num_envs, 1)
        uniform = torch.rand(size, generator=self.generator, device=self.device)
        following = (self.ladders[rows] < uniform).sum(1).clamp(max=self.state_dim - 1)  # (E,)
        next_state = self.one_hot[following]
        self.clock = self.clock + 1
        over = dones | (self.clock >= self.horizon)
        self.clock = self.clock.masked_fill(over, 0)
        self.numbers = torch.where(over, self.draw_states(), following)
        self.state = self.one_hot[self.numbers]
        return rewards, dones, over, next_state
