"""A negotiation over two goods as a text game: SimpleNegotiation-v1 of SPIRAL (spiral-rl/spiral at a02d0ed)."""

import random
import re

from envs.control_tokens import CONTROL
from envs.game import Game, boxed, spoken

# What a message must not bring into the other player's prompt: tags of thoughts, control tokens of chat templates.
MARKUP = re.compile(rf"</?think>|{CONTROL}", re.IGNORECASE)
MAX_MESSAGE_CHARS = 200  # of a message that is shown: nobody may flood the other player's context


class Negotiation(Game):
    """Ten messages, Player 0 begins. Both hold 10 Wood and 10 Gold, and value them differently. The larger gain wins.

    A message is free text with tokens in any case: [Offer: 2 Wood, 1 Gold -> 3 Gold], [Accept], [Deny]. An offer stays
    open until it is accepted, denied or replaced. The game rejects an offer that is malformed or beyond one's own
    goods, accepting one's own offer, and accepting what one cannot pay. 1:1 trades are draws: who gets more units wins.
    """

    MESSAGES = 10
    VALUES = ({"Wood": 5, "Gold": 15}, {"Wood": 15, "Gold": 5})

    def start(self, generator: random.Random) -> None:
        self.goods = [{"Wood": 10, "Gold": 10}, {"Wood": 10, "Gold": 10}]
        self.offer, self.messages = None, []  # (player, what it gives, what it wants); (player, message)

    def legal_actions(self) -> list[str]:
        """[Accept] and [Deny] if there is something to answer, and each offer of one good for another that both could
        carry out now; any other text is a legal message too."""
        own, other = self.goods[self.player], self.goods[1 - self.player]
        offers = [
            f"[Offer: {give} {good} -> {take} {wanted}]"
            for good, wanted in (("Wood", "Gold"), ("Gold", "Wood"))
            for give in range(1, own[good] + 1)
            for take in range(1, other[wanted] + 1)
        ]
        return self.answers(self.player) + offers

    def answers(self, player: int) -> list[str]:
        if self.offer is None or self.offer[0] == player:
            return []
        return ["[Accept]"] * self.covers(self.goods[player], self.offer[2]) + ["[Deny]"]

    def observation(self, player: int) -> str:
        goods = " and ".join(
            f"{n} {good} worth {self.VALUES[player][good]} each" for good, n in self.goods[player].items()
        )
        lines = [f"You are Player {player} in a negotiation. You have {goods}. More gain wins."]
        lines += [f"Player {who}: {message[:MAX_MESSAGE_CHARS]}" for who, message in self.messages]
        if self.offer and not any(self.offer_text in line for line in lines):  # cut off above
            giver, *sides = self.offer
            gives, wants = (" and ".join(f"{n} {good}" for good, n in side.items()) for side in sides)
            lines.append(f"Player {giver} offers {gives} for {wants}.")
        actions = ", ".join([*self.answers(player), "offers like [Offer: 3 Wood -> 2 Gold], or talk"])
        number = f"Message {len(self.messages) + 1} of {self.MESSAGES}."
        return "\n".join([*lines, f"{number} Available actions: {actions}. Choose your next action."])

    def parse(self, text: str) -> str:
        """What the box holds, without a box all but the thoughts: they are not for the other player. No markup."""
        content = boxed(text)
        message = spoken(text) if content is None else content
        return " ".join(MARKUP.sub(" ", message).split())

    def play(self, message: str) -> bool:
        self.messages.append((self.player, message))
        accept, deny = (re.search(rf"\[{word}\]", message, re.IGNORECASE) for word in ("accept", "deny"))
        if self.offer and accept:
            proposer, gives, wants = self.offer
            if proposer == self.player or not self.covers(self.goods[self.player], wants):
                return False
            for giver, goods in ((proposer, gives), (self.player, wants)):
                for good, number in goods.items():
                    self.goods[giver][good] -= number
                    self.goods[1 - giver][good] += number
            self.offer = None
        elif self.offer and deny and self.offer[0] != self.player:
            self.offer = None
        found = re.search(r"\[offer:([^\[\]]+)\]", message, re.IGNORECASE)
        if found:
            text = re.sub(r"^(i (give|offer) ){1,2}", "", found[1].strip().rstrip(".,!? "), flags=re.IGNORECASE)
            sides = [parse_goods(side) for side in text.split("->")]
            if len(sides) != 2 or not all(sides) or not self.covers(self.goods[self.player], sides[0]):
                return False
            self.offer, self.offer_text = (self.player, *sides), found[0]
        self.player = 1 - self.player
        if len(self.messages) == self.MESSAGES:
            gain = self.gain(0) - self.gain(1)
            if gain:
                self.end(0 if gain > 0 else 1, 1.0, -1.0, "win")
            else:
                self.end(0, 0.0, 0.0, "draw")
        return True

    def gain(self, player: int) -> int:
        return sum((self.goods[player][good] - 10) * value for good, value in self.VALUES[player].items())

    @staticmethod
    def covers(goods: dict, wanted: dict) -> bool:
        return all(goods[good] >= number for good, number in wanted.items())


def parse_goods(text: str) -> dict[str, int] | None:
    """`2 wood, 1 Gold and 3 woods` as {"Wood": 5, "Gold": 1}; None if anything in it is not an amount of these."""
    goods = {}
    for item in re.split(r", ?| and ", text, flags=re.IGNORECASE):
        found = re.fullmatch(r"([0-9]{1,99}) (wood|gold)s?", item.strip(), re.IGNORECASE)
        if item.strip() and (not found or int(found[1]) == 0):
            return None
        if found:
            goods[found[2].title()] = goods.get(found[2].title(), 0) + int(found[1])
    return goods
