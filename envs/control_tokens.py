"""Control tokens of chat templates. A text that somebody else wrote, or that was found, must not bring them into a prompt:
`<|im_end|>` in a teammate's answer would end the message that shows it. No dependencies, importable alone.
"""

import re

FAMILIES = (
    r"<[|｜][^<>|｜]*[|｜]>",  # <|im_end|>, <|eot_id|>; DeepSeek's <｜end▁of▁sentence｜>, with wide bars
    r"<[|｜]\w+>|<\w+[|｜]>",  # <|turn> and <turn|>
    r"</?s>|<(?:bos|eos|pad|unk|mask|sop|start_of_turn|end_of_turn)>",
    r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]|<</?SYS>>",
)
CONTROL = "|".join(FAMILIES)


def without_control(text: str) -> str:
    """The text with a space for each control token."""
    return re.sub(CONTROL, " ", text, flags=re.IGNORECASE)
