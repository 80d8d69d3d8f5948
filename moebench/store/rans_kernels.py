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
PIECE = 1 << 14  # symbols of 16-bit floats that are decoded before they are put together
# There gather and expand from memory are an instruction each; elsewhere they become 16 branches, and a plain loop wins.
VECTOR = binding.get_host_cpu_features().get("avx512vbmi2", False)

DEST, COUNT, KIND, LANES, SYMBOLS, WORDS, BODY, FIELDS = range(8)  # of a plane's record, all uint32
BYTES, HIGH, LOW = range(3)  # kinds of planes: a part's bytes, or the two of 16-bit floats turned left by one bit
SOUND, BOUNDS, TABLE, STREAM = range(4)  # how the decoding of a plane ended

_u32, _u64 = np.uint32, np.uint64


def _compiled(function):
    """Compile ``function`` to run without the interpreter's lock; the result is kept on disk where it may be."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither this folder nor the user's own may: compiled anew by each process
        return njit(nogil=True)(function)


@_compiled
def count(data: np.ndarray) -> np.ndarray:
    """How often each of the 256 byte values stands in ``data`` (uint8): int64 [256]."""
    parts = np.zeros(4 * 256, np.int64)  # four, so that runs of one value do not wait for each other
    for i in range(data.size):
        parts[(i & 3) << 8 | data[i]] += 1
    return parts[:256] + parts[256:512] + parts[512:768] + parts[768:]


@_compiled
def look_up(table: np.ndarray, places: np.ndarray) -> np.ndarray:
    """``table[places]`` for places uint16, several times as fast as numpy."""
    values = np.empty(places.size, table.dtype)
    for i in range(places.size):
        values[i] = table[places[i]]
    return values


@_compiled
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


@_compiled
def encode(data: np.ndarray, frequencies: np.ndarray, lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """States uint32 [lanes] and words uint16 from which ``_symbols`` brings back ``data`` (uint8)."""
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


@_compiled
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
def _address(typing, array, index):
    """Pointer to ``array[index]``, for ``_vector_step``."""

    def generate(context, builder, signature, args):
        data = arrayobj.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.gep(data, [args[1]])

    return types.CPointer(array.dtype)(array, types.int64), generate


@intrinsic
def _vector_step(typing, states, table, words, out):
    """Decode one symbol of each of ``WIDTH`` lanes to ``out``; returns the number of words taken in."""

    def generate(context, builder, signature, args):
        b, (states, table, words, out) = builder, args
        i1, i8, i16, i32, i64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))

        def vector(kind):
            return ir.VectorType(kind, WIDTH)

        def every(value, kind=i32):
            return ir.Constant(vector(kind), [value] * WIDTH)

        def call(name, result, *values):
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


@_compiled
def _symbols(stream, position, table, states, out, vector) -> int:
    """Decode the next symbols of a plane to ``out`` (uint8), whole rows of lanes or the plane's last ones.

    Takes words of ``stream`` (uint16, not empty) from ``position`` on and moves ``states`` (uint32) forward; returns
    the position behind them, which is beyond the end where words were missing.
    """
    lanes, last, i = states.size, stream.size - 1, 0
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
    return position


@_compiled
def _open(stored, record, table):
    """Status, states (a copy) and words of a coded plane, these behind its frequencies; fills ``table``."""
    lanes, symbols = record[LANES], record[SYMBOLS]
    tables = record[BODY] + 4 * lanes
    end = tables + 2 * symbols + 2 * record[WORDS]
    if lanes > record[COUNT] or symbols < 1 or symbols > 256 or end + symbols > stored.size:
        return BOUNDS, np.empty(0, np.uint32), np.empty(0, np.uint16)
    stream = stored[tables:end].view(np.uint16)
    sound = fill_table(stored[end : end + symbols], stream[:symbols], table)
    return (SOUND if sound else TABLE), stored[record[BODY] : tables].view(np.uint32).copy(), stream


@_compiled
def _plane(stored, record, table, out, vector):
    """Put the symbols of one plane into ``out`` (uint8 [count]); returns its status."""
    if record[LANES] == 0:
        if record[BODY] + record[COUNT] > stored.size:
            return BOUNDS
        out[:] = stored[record[BODY] : record[BODY] + record[COUNT]]
        return SOUND
    status, states, stream = _open(stored, record, table)
    if status != SOUND:
        return status
    position = _symbols(stream, record[SYMBOLS], table, states, out, vector)
    return SOUND if position == stream.size and (states == START).all() else STREAM


@_compiled
def _join(high, low, values):
    """16-bit floats from their planes: turn them right by one bit."""
    for i in range(values.size):
        values[i] = _u32(high[i]) << _u32(7) | _u32(low[i]) >> _u32(1) | (_u32(low[i]) & _u32(1)) << _u32(15)


@_compiled
def _floats(stored, above, below, table, out, vector):
    """Decode a HIGH and a LOW plane into ``out`` (uint8); in pieces that stay in the processor's nearest memory."""
    count = above[COUNT]
    low = stored[:0]
    if below[LANES] == 0:
        if below[BODY] + count > stored.size:
            return BOUNDS
        low = stored[below[BODY] : below[BODY] + count]
    else:
        low = np.empty(count, np.uint8)
        status = _plane(stored, below, table, low, vector)
        if status != SOUND:
            return status
    values = out.view(np.uint16)
    lanes = above[LANES]
    if lanes == 0:
        if above[BODY] + count > stored.size:
            return BOUNDS
        _join(stored[above[BODY] : above[BODY] + count], low, values)
        return SOUND
    status, states, stream = _open(stored, above, table)
    if status != SOUND:
        return status
    piece = np.empty(max(1, PIECE // lanes) * lanes, np.uint8)
    position = above[SYMBOLS]
    for start in range(0, count, piece.size):
        end = min(start + piece.size, count)
        high = piece[: end - start]
        position = _symbols(stream, position, table, states, high, vector)
        _join(high, low[start:end], values[start:end])
    return SOUND if position == stream.size and (states == START).all() else STREAM


@_compiled
def decode_planes(stored, records, out, vector) -> tuple[int, int]:
    """Decode the planes of ``stored`` (uint8) that ``records`` (int64 [planes, FIELDS]) lists into ``out`` (uint8).

    What no plane fills becomes zero. Returns a status and the plane it belongs to.
    """
    table = np.empty(TOTAL, np.uint32)
    end, i = 0, 0
    while i < len(records):
        record = records[i]
        dest, count, kind = record[DEST], record[COUNT], record[KIND]
        width = 1 if kind == BYTES else 2
        if dest < end or dest % width or dest + width * count > out.size or kind not in (BYTES, HIGH):
            return BOUNDS, i
        out[end:dest] = 0
        end = dest + width * count
        if kind == BYTES:
            status = _plane(stored, record, table, out[dest:end], vector)
        else:
            i += 1
            pair = i < len(records) and records[i, KIND] == LOW
            if not pair or records[i, COUNT] != count or records[i, DEST] != dest:
                return BOUNDS, i - 1
            status = _floats(stored, record, records[i], table, out[dest:end], vector)
        if status != SOUND:
            return status, i
        i += 1
    out[end:] = 0
    return SOUND, 0
