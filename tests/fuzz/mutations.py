"""What becomes of a valid file: bytes changed anywhere, or JSON changed within its structure."""

import copy

from hypothesis import strategies as st

NUMBERS = [0, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**60, 2**63 - 1, 2**63, 2**64 - 1]
ODD = [
    *NUMBERS,
    *(-number for number in NUMBERS),
    *(10**18, 10**400, 0.0, -1.5, 1e308, float("nan"), float("inf"), True, False, None),
    *("", ".", "..", "../x", "/etc/passwd", "a\0b", "\ud800", "0" * 32, "F32", "1e999", "é" * 200),
    *([], {}, [[]], [None], {"": None}, [2**62] * 70, {"step": 1}),
]

# A place is taken modulo the length, so that a number stays of use when the bytes change.
PLACE = st.integers(0, 2**20)


def mutated(original):
    """Return a strategy for bytes that were `original` before some changes."""
    short = st.binary(min_size=1, max_size=20)
    number = st.sampled_from(NUMBERS).map(lambda n: (n % 2**64).to_bytes(8, "little"))
    change = st.one_of(
        st.tuples(st.just(flip), PLACE, st.integers(0, 7)),
        st.tuples(st.just(overwrite), PLACE, short | number),
        st.tuples(st.just(insert), PLACE, short | number),
        st.tuples(st.just(truncate), PLACE, st.none()),
        st.tuples(st.just(delete), PLACE, st.integers(1, 600)),
        st.tuples(st.just(blank), PLACE, st.integers(1, 1200)),
        st.tuples(st.just(duplicate), PLACE, st.integers(1, 1200)),
        st.tuples(st.just(splice), PLACE, PLACE),
        st.tuples(st.just(swap), PLACE, PLACE),
    )
    return st.lists(change, min_size=1, max_size=4).map(lambda c: apply_all(original, c))


def apply_all(original, changes):
    data = bytearray(original)
    for change, place, argument in changes:
        if data:
            change(data, place % len(data), argument)
    return bytes(data)


def flip(data, place, bit):
    data[place] ^= 1 << bit


def overwrite(data, place, new):
    data[place : place + len(new)] = new


def insert(data, place, new):
    data[place:place] = new


def truncate(data, place, _):
    del data[place:]


def delete(data, place, count):
    del data[place : place + count]


def blank(data, place, count):
    count = min(count, len(data) - place)
    data[place : place + count] = bytes(count)


def duplicate(data, place, count):
    data[place:place] = data[place : place + count]


def splice(data, place, other):
    """What lies behind one place goes on behind another."""
    data[place:] = data[other % len(data) :]


def swap(data, place, other):
    """Two sectors change places, or what is left of them."""
    first, second = sorted((place // 512 * 512, other % len(data) // 512 * 512))
    parts = data[first : first + 512], data[second : second + 512]
    if first != second and len(parts[0]) == len(parts[1]):
        data[first : first + 512], data[second : second + 512] = parts[1], parts[0]


def mutated_json(original):
    """Return a strategy for a JSON mapping or list that was `original` before some changes."""
    what = st.sampled_from([replace, remove, repeat, rename, exchange])
    change = st.tuples(what, PLACE, PLACE, st.sampled_from(ODD))
    return st.lists(change, min_size=1, max_size=3).map(lambda c: json_changed(original, c))


def json_changed(original, changes):
    root = copy.deepcopy(original)
    for change, first, second, odd in changes:
        places = list(places_in(root))
        if places:
            change(places[first % len(places)], places[second % len(places)], copy.deepcopy(odd))
    return root


def places_in(value):
    """Yield every place of a value as the container and the key, outermost first."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places_in(inner)


def replace(place, _, odd):
    place[0][place[1]] = odd


def remove(place, _, __):
    del place[0][place[1]]


def repeat(place, _, __):
    container, key = place
    if isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    else:
        container[f"{key}2"] = copy.deepcopy(container[key])


def rename(place, other, odd):
    container, key = place
    if isinstance(container, dict) and container is not other[0]:
        container[str(other[1]) if isinstance(odd, int) else str(odd)] = container.pop(key)


def exchange(place, other, _):
    first, second = copy.deepcopy(place[0][place[1]]), copy.deepcopy(other[0][other[1]])
    place[0][place[1]] = second
    if other[1] in other[0] if isinstance(other[0], dict) else other[1] < len(other[0]):
        other[0][other[1]] = first
