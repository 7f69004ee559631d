"""Calls one function of the program with arguments from standard input, and puts its result out as JSON.

This stands after the program, in one file with it, so that both are compiled once for all cases. In front of the
program stands `FIRST` of `cases.py`. Input: `{"function": name, "arguments": [...]}`.
"""


def rollmesh_call(names, channel):  # type: ignore[no-untyped-def]  # names of `typing` may be the program's
    import json
    import os
    import sys
    from collections.abc import Mapping, Set

    def argument(value):  # type: ignore[no-untyped-def]
        # JSON has texts for names of objects; those that are all integers were integers.
        if isinstance(value, dict) and value and all(name.lstrip("-").isdecimal() for name in value):
            return {int(name): entry for name, entry in value.items()}
        return value

    def plain(value):  # type: ignore[no-untyped-def]
        if isinstance(value, Mapping):
            return {name if isinstance(name, str) else str(name): plain(entry) for name, entry in value.items()}
        if isinstance(value, Set):
            return sorted(map(plain, value), key=repr)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        return [plain(entry) for entry in value]

    request = json.loads(sys.stdin.buffer.read())
    owner = names["Solution"]() if "Solution" in names else None
    function = getattr(owner, request["function"], None) or names[request["function"]]
    data = json.dumps(plain(function(*map(argument, request["arguments"])))).encode()
    if callable(channel):  # that of `batch.py`
        channel(data)
        return
    while data:
        data = data[os.write(channel, data) :]


if __name__ == "solution":
    rollmesh_call(globals(), globals()["rollmesh_channel"])
