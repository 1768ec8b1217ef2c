"""Carry a fix of a shared block from one script into its siblings: `python tests/sync_shared_blocks.py grpo`.

Every definition and flag that a sibling has under the same name, and that no essay declares as different, gets the text
of the script named. It prints what it replaced; look at `git diff` before committing.
"""

import sys

from test_house_rules import FREE, ROOT, SCRIPTS, Script, blocks, declared_differences


def shared_text(origin: Script, script: Script) -> tuple[str, list[str]]:
    """The script with the shared blocks of the origin, and the names that were replaced."""
    here, there = blocks(script.source), blocks(origin.source)
    kept = declared_differences(origin)[1] | declared_differences(script)[1] | FREE[script.family]
    free_flags = script.family == "control"  # their Args have nothing in common
    names = [name for name in here if name in there and here[name].text != there[name].text]
    names = [name for name in names if name.removeprefix("Args.") not in kept]
    names = [name for name in names if not (free_flags and name.startswith("Args."))]
    lines = script.source.splitlines()
    for name in sorted(names, key=lambda name: -here[name].first):  # from below, so that line numbers above stay true
        lines[here[name].first - 1 : here[name].last] = there[name].text.splitlines()
    return "\n".join(lines) + "\n", names


if __name__ == "__main__":
    known = {script.name: script for script in SCRIPTS}
    if len(sys.argv) != 2 or sys.argv[1] not in known:
        sys.exit(f"usage: python tests/sync_shared_blocks.py {{{','.join(known)}}}")
    start = known[sys.argv[1]]
    for script in SCRIPTS:
        if script.family == start.family and script is not start:
            text, names = shared_text(start, script)
            (ROOT / "algorithms" / f"{script.name}.py").write_text(text)
            print(f"{script.name}.py: {', '.join(names) or 'nothing to do'}")
