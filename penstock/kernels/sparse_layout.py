"""The order in which sparse products read the entries of a matrix.

A matrix is divided into cells: bands of rows times blocks of columns. The inputs of a block stay in
the first-level cache while the cell's rows pass by; where rows have few entries, blocks are wider
and stay in the second. Within a cell, the entries of a row are a segment, and segments ascend by
their number of entries: the processor predicts the end of a loop that ends as the previous one did,
and products that interleave rows take the first row's number of entries for all of them. The order
of rows of equal length changes no result, and the entries of a row are added in the order of their
columns, whatever the cells.
"""

from penstock.kernels.compilation import serial_kernel

MOST_BLOCK_COLUMNS = 1 << 16
"""Columns are counted from the first of their block, in 16 bits."""


@serial_kernel
def transpose(row_starts, columns, column_starts, rows, positions):
    """Write the transposed matrix.

    Args:
        row_starts: int64 `[rows + 1]`.
        columns: int32 `[entries]`.
        column_starts: int64 `[columns + 1]`, zeroed; becomes the starts of the transposed rows.
        rows: int32 `[entries]`, the transposed matrix's columns.
        positions: int32 `[entries]`, where each of its entries was.
    """
    for n in range(columns.size):
        column_starts[columns[n] + 1] += 1
    for column in range(column_starts.size - 1):
        column_starts[column + 1] += column_starts[column]
    # Each start moves to its end, which is the next one's start, and all are then shifted back.
    for row in range(row_starts.size - 1):
        for n in range(row_starts[row], row_starts[row + 1]):
            place = column_starts[columns[n]]
            rows[place] = row
            positions[place] = n
            column_starts[columns[n]] = place + 1
    for column in range(column_starts.size - 1, 0, -1):
        column_starts[column] = column_starts[column - 1]
    column_starts[0] = 0


@serial_kernel
def count_segments(row_starts, columns, block_columns, counts):
    """Add up the entries of each row in each block: int32 `[blocks * rows]`, zeroed."""
    rows = row_starts.size - 1
    for row in range(rows):
        for n in range(row_starts[row], row_starts[row + 1]):
            counts[columns[n] // block_columns * rows + row] += 1


@serial_kernel
def order_segments(counts, rows, band_rows, places, cells, segment_rows, starts):
    """Order the segments of each cell by their number of entries, ascending, then by row.

    The first and the last block of a row have a segment even without entries: sums start and end
    there.

    Args:
        counts: int32 `[blocks * rows]`, of which each element becomes the start of its segment.
        places: int32 `[block_columns + 2]`, overwritten.
        cells: int64 `[bands * blocks + 1]`: first segment of each cell.
        segment_rows: int32, one per segment: its row.
        starts: int32, one more: its first entry, in the order of the matrix.

    Returns:
        the number of segments.
    """
    blocks = counts.size // rows
    segments = entries = cell = 0
    for low in range(0, rows, band_rows):
        high = min(low + band_rows, rows)
        for block in range(blocks):
            cells[cell] = segments
            cell += 1
            least = 0 if block == 0 or block == blocks - 1 else 1
            places[:] = 0
            for row in range(low, high):
                count = counts[block * rows + row]
                if count >= least:
                    places[count + 1] += 1
            for count in range(places.size - 1):
                places[count + 1] += places[count]
            total = places[places.size - 1]
            for row in range(low, high):
                count = counts[block * rows + row]
                if count >= least:
                    slot = segments + places[count]
                    places[count] += 1
                    segment_rows[slot] = row
            for slot in range(segments, segments + total):
                at = block * rows + segment_rows[slot]
                starts[slot] = entries
                entries += counts[at]
                counts[at] = starts[slot]
            segments += total
    cells[cell] = segments
    starts[segments] = entries
    return segments


@serial_kernel
def place_entries(row_starts, columns, sources, block_columns, places, local_columns, positions):
    """Write the entries in the order of the matrix.

    Args:
        sources: int32 `[entries]`, where each entry's value is; empty: the entries' own order.
        places: what `order_segments` made of its counts; overwritten.
        local_columns: uint16 `[entries]`, columns from the first of their block.
        positions: int32 `[entries]`, where the value of each entry is.
    """
    rows = row_starts.size - 1
    for row in range(rows):
        for n in range(row_starts[row], row_starts[row + 1]):
            block = columns[n] // block_columns
            place = places[block * rows + row]
            places[block * rows + row] = place + 1
            local_columns[place] = columns[n] - block * block_columns
            positions[place] = sources[n] if sources.size > 0 else n


@serial_kernel
def first_fault(row_starts, columns, column_count):
    """Return the first row with a column out of range or out of order, or -1 if there is none."""
    for row in range(row_starts.size - 1):
        previous = -1
        for n in range(row_starts[row], row_starts[row + 1]):
            if columns[n] <= previous or columns[n] >= column_count:
                return row
            previous = columns[n]
    return -1
