"""The compiled loops of the rANS codec (Duda 2013, Giesen 2014): count, encode and decode planes of byte symbols.

Frequencies are 12-bit, states 32-bit in [2^16, 2^32), and a state takes in or gives off at most one 16-bit word per
symbol. Symbol i of a plane belongs to lane i mod lanes; all lanes share one stream of words in the order of decoding. A
table entry packs symbol (bits 0-7), slot minus start (8-19) and frequency minus one (20-31). Nothing that stands in a
stream makes the decoder read or write outside its arrays; a wrong stream ends in a status. Knows no files, no tensors.
"""

from __future__ import annotations

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

TOTAL = 4096  # frequencies of a plane add up to it
START = 1 << 16  # a lane's state before its first and after its last symbol
WIDTH = 16  # lanes that one vector step decodes
# There gather and expand from memory are an instruction each; elsewhere they become 16 branches, and a plain loop wins.
VECTOR = binding.get_host_cpu_features().get("avx512vbmi2", False)

DEST, COUNT, KIND, LANES, SYMBOLS, WORDS, BODY, FIELDS = range(8)  # of a plane's record, all uint32
BYTES, HIGH, LOW = range(3)  # kinds of planes: a part's bytes, or the two of 16-bit floats turned left by one bit
SOUND, BOUNDS, TABLE, STREAM = range(4)  # how the decoding of a plane ended

_u32, _u64 = np.uint32, np.uint64


@njit(nogil=True, cache=True)
def count(data: np.ndarray) -> np.ndarray:
    """How often each of the 256 byte values stands in ``data`` (uint8): int64 [256]."""
    parts = np.zeros((4, 256), np.int64)  # four, so that runs of one value do not wait for each other
    for i in range(data.size):
        parts[i & 3, data[i]] += 1
    return parts.sum(axis=0)


@njit(nogil=True, cache=True)
def look_up(table: np.ndarray, places: np.ndarray) -> np.ndarray:
    """``table[places]`` for places uint16, several times as fast as numpy."""
    values = np.empty(places.size, table.dtype)
    for i in range(places.size):
        values[i] = table[places[i]]
    return values


@njit(nogil=True, cache=True)
def normalise(counts: np.ndarray) -> np.ndarray:
    """Frequencies int64 [256] that add up to ``TOTAL``, each present symbol at least 1, near the cheapest code."""
    frequencies, total = np.zeros(256, np.int64), counts.sum()
    for symbol in range(256):
        if counts[symbol]:
            frequencies[symbol] = max(1, (counts[symbol] * TOTAL + total // 2) // total)
    excess = frequencies.sum() - TOTAL
    while excess:
        step = -1 if excess > 0 else 1
        best, least = -1, np.inf
        for symbol in range(256):
            if counts[symbol] and frequencies[symbol] + step >= 1:
                bits = counts[symbol] * np.log2(frequencies[symbol] / (frequencies[symbol] + step))
                if bits < least:
                    best, least = symbol, bits
        frequencies[best] += step
        excess += step
    return frequencies


@njit(nogil=True, cache=True)
def encode(data: np.ndarray, frequencies: np.ndarray, lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """States uint32 [lanes] and words uint16 from which ``decode_plane`` brings back ``data`` (uint8)."""
    starts, inverse = np.zeros(256, np.uint32), np.zeros(256, np.float64)
    start = 0
    for symbol in range(256):
        starts[symbol] = start
        start += frequencies[symbol]
        if frequencies[symbol]:
            inverse[symbol] = 1.0 / frequencies[symbol]
    states = np.full(lanes, START, np.uint32)
    words, position = np.empty(data.size + 1, np.uint16), data.size  # at most one word a symbol, and one to spare
    lane = (data.size - 1) % lanes
    for i in range(data.size - 1, -1, -1):
        symbol, state = data[i], _u64(states[lane])
        frequency = _u64(frequencies[symbol])
        words[position] = _u32(state) & _u32(0xFFFF)  # kept only if the position moves on
        full = _u64(state >= frequency << _u64(20))
        position -= np.int64(full)
        state >>= full << _u64(4)
        # The half keeps a multiple of the frequency from falling below its quotient; 53 bits hold all of it exactly.
        quotient = _u32((np.float64(state) + 0.5) * inverse[symbol])
        rest = _u32(state) - quotient * _u32(frequency)
        states[lane] = (quotient << _u32(12)) + rest + starts[symbol]
        lane = lane - 1 if lane else lanes - 1
    return states, words[position + 1 :].copy()


@njit(nogil=True, cache=True)
def fill_table(symbols: np.ndarray, frequencies: np.ndarray, table: np.ndarray) -> bool:
    """Fill the decoding table uint32 [TOTAL] from a sparse one (uint8, uint16); False where that is none."""
    slot = 0
    for i in range(symbols.size):
        frequency = np.int64(frequencies[i])
        if frequency < 1 or slot + frequency > TOTAL:
            return False
        for offset in range(frequency):
            table[slot] = _u32(symbols[i]) | _u32(offset << 8) | _u32((frequency - 1) << 20)
            slot += 1
    return slot == TOTAL


@intrinsic
def _address(typing, array, index):  # type: ignore[no-untyped-def]
    """Pointer to ``array[index]``, for ``_vector_step``."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = arrayobj.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.gep(data, [args[1]])

    return types.CPointer(array.dtype)(array, types.int64), generate


@intrinsic
def _vector_step(typing, states, table, words, out):  # type: ignore[no-untyped-def]
    """Decode one symbol of each of ``WIDTH`` lanes to ``out``; returns the number of words taken in."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        b, (states, table, words, out) = builder, args
        i1, i8, i16, i32, i64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))

        def vector(kind):  # type: ignore[no-untyped-def]
            return ir.VectorType(kind, WIDTH)

        def every(value, kind=i32):  # type: ignore[no-untyped-def]
            return ir.Constant(vector(kind), [value] * WIDTH)

        def call(name, result, *values):  # type: ignore[no-untyped-def]
            kind = ir.FunctionType(result, [value.type for value in values])
            return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.{name}"), values)

        place = b.bitcast(states, vector(i32).as_pointer())
        state = b.load(place, align=4)
        slots = b.zext(b.and_(state, every(TOTAL - 1)), vector(i64))
        base = b.insert_element(ir.Constant(vector(i64), ir.Undefined), b.ptrtoint(table, i64), ir.Constant(i32, 0))
        base = b.shuffle_vector(base, base, every(0))
        entries = b.inttoptr(b.add(base, b.shl(slots, every(2, i64))), vector(i32.as_pointer()))
        gather = f"masked.gather.v{WIDTH}i32.v{WIDTH}p0"
        entry = call(gather, vector(i32), entries, ir.Constant(i32, 4), every(1, i1), every(0))
        b.store(b.trunc(entry, vector(i8)), b.bitcast(out, vector(i8).as_pointer()), align=1)
        frequency = b.add(b.lshr(entry, every(20)), every(1))
        offset = b.and_(b.lshr(entry, every(8)), every(TOTAL - 1))
        state = b.add(b.mul(frequency, b.lshr(state, every(12))), offset)
        low = b.icmp_unsigned("<", state, every(START))
        word = call(f"masked.expandload.v{WIDTH}i16", vector(i16), words, low, every(0, i16))
        taken_in = b.or_(b.shl(state, every(16)), b.zext(word, vector(i32)))
        b.store(b.select(low, taken_in, state), place, align=4)
        mask = ir.IntType(WIDTH)
        return b.zext(call(f"ctpop.i{WIDTH}", mask, b.bitcast(low, mask)), i64)

    pointers = (types.uint32, types.uint32, types.uint16, types.uint8)
    return types.int64(*map(types.CPointer, pointers)), generate


@njit(nogil=True, cache=True)
def decode_plane(stream, first, table, states, out, vector) -> bool:  # type: ignore[no-untyped-def]
    """Decode ``out`` (uint8) from the words of ``stream`` (uint16) after ``first``; uses up ``states`` (uint32).

    True where all words were taken in and every lane came back to its start. ``stream`` may not be empty.
    """
    lanes, position, last, i = states.size, first, stream.size - 1, 0
    while i < out.size:
        row, lane = min(lanes, out.size - i), 0
        while lane < row:
            if vector and lane + WIDTH <= row and position + WIDTH <= stream.size:
                position += _vector_step(
                    _address(states, lane), _address(table, 0), _address(stream, position), _address(out, i + lane)
                )
                lane += WIDTH
                continue
            state = states[lane]
            entry = table[state & _u32(TOTAL - 1)]
            out[i + lane] = np.uint8(entry & _u32(0xFF))
            state = ((entry >> _u32(20)) + _u32(1)) * (state >> _u32(12)) + ((entry >> _u32(8)) & _u32(TOTAL - 1))
            low = state < _u32(START)
            word = _u32(stream[min(position, last)])
            states[lane] = (state << _u32(16)) | word if low else state
            position += low
            lane += 1
        i += row
    return position == stream.size and (states == START).all()


@njit(nogil=True, cache=True)
def _plane(stored, record, table, scratch, vector):  # type: ignore[no-untyped-def]
    """Status and bytes of one plane; raw ones are a view of ``stored``, coded ones stand in ``scratch``."""
    count, lanes, symbols, words, body = record[COUNT], record[LANES], record[SYMBOLS], record[WORDS], record[BODY]
    if lanes == 0:
        if body + count > stored.size:
            return BOUNDS, scratch[:0]
        return SOUND, stored[body : body + count]
    tables = body + 4 * lanes
    stream = tables + 2 * symbols
    end = stream + 2 * words
    if lanes > count or symbols < 1 or symbols > 256 or end + symbols > stored.size:
        return BOUNDS, scratch[:0]
    frequencies = stored[tables:stream].view(np.uint16)
    if not fill_table(stored[end : end + symbols], frequencies, table):
        return TABLE, scratch[:0]
    states = stored[body:tables].view(np.uint32).copy()
    if not decode_plane(stored[tables:end].view(np.uint16), symbols, table, states, scratch[:count], vector):
        return STREAM, scratch[:0]
    return SOUND, scratch[:count]


@njit(nogil=True, cache=True)
def decode_planes(stored, records, out, vector) -> tuple[int, int]:  # type: ignore[no-untyped-def]
    """Decode the planes of ``stored`` (uint8) that ``records`` (int64 [planes, FIELDS]) lists into ``out`` (uint8).

    What no plane fills becomes zero. Returns a status and the plane it belongs to.
    """
    table = np.empty(TOTAL, np.uint32)
    end, halves = 0, 0
    for i in range(len(records)):
        if records[i, KIND] != BYTES:
            halves = max(halves, min(records[i, COUNT], out.size))
    scratch = np.empty((2, halves), np.uint8)
    high = scratch[0]
    waits = False  # a HIGH plane for its LOW one
    for i in range(len(records)):
        record = records[i]
        dest, count, kind = record[DEST], record[COUNT], record[KIND]
        width = 1 if kind == BYTES else 2
        if dest < end or dest + width * count > out.size or kind > LOW or waits != (kind == LOW):
            return BOUNDS, i
        if kind == BYTES:
            target = out[dest : dest + count]
        else:
            target = scratch[kind - HIGH]
            if dest % 2:
                return BOUNDS, i
        status, plane = _plane(stored, record, table, target, vector)
        if status != SOUND:
            return status, i
        if kind == HIGH:
            high, waits = plane, True
            continue
        out[end:dest] = 0
        end = dest + width * count
        if kind == BYTES:
            if record[LANES] == 0:
                target[:] = plane
            continue
        waits = False
        if high.size != count:
            return BOUNDS, i
        values = out[dest:end].view(np.uint16)
        for j in range(count):
            turned = _u32(high[j]) << _u32(8) | _u32(plane[j])
            values[j] = np.uint16((turned >> _u32(1) | turned << _u32(15)) & _u32(0xFFFF))
    out[end:] = 0
    return (BOUNDS if waits else SOUND), len(records) - 1
