"""What falls to each part of a call: the same cut as templates/macrokernel/cut.cpp.j2 makes.

Names are those of the template. A batch has one product here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.catalog import family_named

# As in the template: a core makes about so many multiplications while it moves one element.
_PRODUCTS_PER_MOVE = 4
_LEAST_PARTS_OF_BANDS = 8
# As in reduce.cpp.j2.
_SLICES_COST = 1.03
_STEPS_PER_SUM = 8


# Rows, columns and depth of each piece of a part.
Shape = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows and columns of y, from the first to before the end."""

    row_begin: int
    row_end: int
    column_begin: int
    column_end: int

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self.row_end - self.row_begin

    @property
    def columns(self) -> int:
        """Return the number of columns."""
        return self.column_end - self.column_begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The pieces of y that one part computes, over columns `k_begin` to before `k_end` of x."""

    pieces: tuple[Piece, ...]
    k_begin: int
    k_end: int

    @property
    def shape(self) -> Shape:
        """Return the sizes of the pieces: parts of the same take as long."""
        depth = self.k_end - self.k_begin
        return tuple((piece.rows, piece.columns, depth) for piece in self.pieces)

    @property
    def products(self) -> int:
        """Return the number of multiplications."""
        depth = self.k_end - self.k_begin
        return sum(piece.rows * piece.columns for piece in self.pieces) * depth


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How a call is cut: into a grid of parts, or tile after tile, and in slices of k or not.

    Tile after tile, y has so many bands of rows.
    """

    grid: tuple[int, int] | None
    bands: int
    slices: int
    parts: tuple[Share, ...]

    @property
    def largest_over_mean(self) -> float:
        """Return the products of the largest part over the mean, 1 where nothing is computed."""
        products = [part.products for part in self.parts]
        return max(products) * len(products) / sum(products) if sum(products) else 1.0

    @property
    def text(self) -> str:
        """Return the cut: `4 x 2`, `tile after tile in 4 bands`, with ` in 4 slices of k`."""
        bands = f" in {self.bands} bands" if self.bands > 1 else ""
        cut = "{} x {}".format(*self.grid) if self.grid else f"tile after tile{bands}"
        return f"{cut} in {self.slices} slices of k" if self.slices > 1 else cut


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    rows: int
    columns: int  # 0: tile after tile, in `rows` bands
    cost: int


def shares_of(problem: Problem, candidate: Candidate, *, m: int, parts: int) -> Shares:
    """Return what each of `parts` parts computes when a kernel is called with `m` rows."""
    cutter = _Cutter(problem=problem, candidate=candidate, m=m)
    whole = Piece(row_begin=0, row_end=m, column_begin=0, column_end=problem.n)
    only = Share(pieces=(whole,), k_begin=0, k_end=problem.k)
    if parts == 1:
        return Shares(grid=(1, 1), bands=1, slices=1, parts=(only,))
    cut, slices = cutter.chosen(parts)
    if slices == 1 and not cutter.gains_by(cut):
        # As whole products of a batch are shared out, a single one falls to the last part.
        idle = Share(pieces=(), k_begin=0, k_end=problem.k)
        return Shares(grid=(1, 1), bands=1, slices=1, parts=(idle,) * (parts - 1) + (only,))
    of_slice = parts // slices
    return Shares(
        grid=(cut.rows, cut.columns) if cut.columns else None,
        bands=1 if cut.columns else cut.rows,
        slices=slices,
        parts=tuple(
            Share(
                pieces=tuple(cutter.pieces(cut, part // slices, of_slice))
                if part // slices < of_slice
                else (),
                k_begin=cutter.slice_begin(part % slices, slices),
                k_end=cutter.slice_begin(part % slices + 1, slices),
            )
            for part in range(parts)
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cutter:
    problem: Problem
    candidate: Candidate
    m: int

    @property
    def _tiles(self) -> int:
        return ceil(self.m / self.candidate.micro_kernel.mr)

    @property
    def _panels(self) -> int:
        return ceil(self.problem.n / self.candidate.micro_kernel.nr) or 1

    @property
    def _family(self) -> MicroKernelFamily:
        return family_named(self.candidate.micro_kernel.family)

    @property
    def _width(self) -> int:
        """Return the columns of y as they are counted: in whole vectors."""
        is_dot = self._family.layout is PackedLayout.COLUMNS
        if is_dot or self.problem.operation.has_values:
            return self.problem.n
        return ceil(self.problem.n / self._family.lanes) * self._family.lanes

    @property
    def _copies_x(self) -> bool:
        digits = self._family.digits(self.problem.types.x)
        return self.candidate.blocking.pack_x or bool(digits)

    def _row_blocks(self, rows: int) -> int:
        return ceil(rows / self.candidate.blocking.mc)

    def chosen(self, parts: int) -> tuple[_Cut, int]:
        """Return the cut of a call in several parts, and the slices of k."""
        blocking = self.candidate.blocking
        is_tuned = parts == self.candidate.parts and self._tiles >= blocking.grid_m
        own = self._grid(blocking.grid_m, blocking.grid_n)
        if blocking.grid_k == 1:
            return (own if is_tuned else self._best(parts)), 1
        cut = self._best(parts)
        if parts >= blocking.grid_k:
            of_slice = own if is_tuned else self._best(parts // blocking.grid_k)
            if is_tuned or of_slice.cost * self._slice_cost() < cut.cost:
                return of_slice, blocking.grid_k
        return cut, 1

    def gains_by(self, cut: _Cut) -> bool:
        """Return whether the largest part of a cut costs less than the whole product."""
        return cut.cost < self._grid(1, 1).cost

    def slice_begin(self, part: int, slices: int) -> int:
        """Return where a slice of k begins, or the last ends."""
        if slices == 1:
            return part * self.problem.k
        kc = self.candidate.blocking.kc
        return min(self._blocks_of_k() * part // slices * kc, self.problem.k)

    def pieces(self, cut: _Cut, part: int, parts: int) -> Iterator[Piece]:
        """Yield the pieces of one of so many parts, those that are not empty."""
        if cut.columns:
            row, column = divmod(part, cut.columns)
            if row < cut.rows:
                yield from self._piece(
                    (self._tiles * row // cut.rows, self._tiles * (row + 1) // cut.rows),
                    (
                        self._panels * column // cut.columns,
                        self._panels * (column + 1) // cut.columns,
                    ),
                )
            return
        begin = self._place(cut.rows, part, parts)
        end = self._place(cut.rows, part + 1, parts)
        for band in range(begin[0], min(cut.rows, end[0] + 1)):
            yield from self._pieces_of_band(
                (self._tiles * band // cut.rows, self._tiles * (band + 1) // cut.rows),
                begin[1:] if band == begin[0] else (0, 0),
                end[1:] if band == end[0] else (self._panels, 0),
            )

    def _pieces_of_band(
        self, tiles: tuple[int, int], begin: tuple[int, int], end: tuple[int, int]
    ) -> Iterator[Piece]:
        """Yield what lies between two places in a band: each is a panel, and a tile in the band."""
        (panel, tile), (end_panel, end_tile) = begin, end
        top, bottom = tiles
        if panel == end_panel:
            yield from self._piece((top + tile, top + end_tile), (panel, panel + 1))
            return
        whole_panel = panel + 1 if tile else panel
        yield from self._piece((top + tile, bottom), (panel, whole_panel))
        yield from self._piece(tiles, (whole_panel, end_panel))
        yield from self._piece((top, top + end_tile), (end_panel, end_panel + 1))

    def _blocks_of_k(self) -> int:
        return ceil(self.problem.k / self.candidate.blocking.kc)

    def _slice_cost(self) -> float:
        blocking = self.candidate.blocking
        steps = ceil(self._blocks_of_k() / blocking.grid_k) * blocking.kc
        return _SLICES_COST * (steps + _STEPS_PER_SUM * self._family.k_step) / self.problem.k

    def _grid(self, rows: int, columns: int) -> _Cut:
        tile = self.candidate.micro_kernel
        most_rows = min(ceil(self._tiles / rows) * tile.mr, self.m)
        most_columns = min(ceil(self._panels / columns) * tile.nr, self._width)
        cost = self._cost(
            most_rows * most_columns,
            most_rows * ceil(most_columns / self.candidate.blocking.nc),
            most_columns * self._row_blocks(most_rows),
            most_columns,
        )
        return _Cut(rows=rows, columns=columns, cost=cost)

    def _in_order(self, parts: int, bands: int) -> _Cut:
        tile, nr = self.candidate.micro_kernel, self.candidate.micro_kernel.nr
        tiles = ceil(self._tiles / bands)
        rows = min(tiles * tile.mr, self.m)
        most_tiles = ceil(self._tiles * self._width / (parts * nr))
        panels, rest = divmod(most_tiles, tiles)
        rest_rows = min(rest * tile.mr, self.m)
        products = (panels * rows + rest_rows) * nr
        ends = 2 if bands > 1 else 1
        columns = (panels * self._row_blocks(rows) + self._row_blocks(rest_rows) + ends) * nr
        times = ends + 2 if self._copies_x else ends
        rows_moved = min(most_tiles * tile.mr, times * rows)
        width = self._width - (self._panels - 1) * nr
        last_rows = min(ceil(most_tiles * nr / width) * tile.mr, rows)
        width_moved = width * self._row_blocks(last_rows)
        cost = max(
            self._cost(products, rows_moved, columns, columns),
            self._cost(last_rows * width, last_rows, width_moved, columns),
        )
        return _Cut(rows=bands, columns=0, cost=cost)

    def _cost(self, products: int, rows: int, columns: int, packed_columns: int) -> int:
        """Return the cost of rows and columns, each as often as a part moves it."""
        blocking = self.candidate.blocking
        packs_w_of_rows = blocking.pack_w and not blocking.loop_order.is_jc_outer
        x_moves = 1 + self._copies_x
        w_moves = 1 + (blocking.convert_once or packs_w_of_rows)
        moves = x_moves * rows + w_moves * columns
        if blocking.pack_w and not packs_w_of_rows:
            moves += packed_columns
        return products + _PRODUCTS_PER_MOVE * moves

    def _best(self, parts: int) -> _Cut:
        best = self._grid(1, 1)
        most_rows = min(parts, self._tiles)
        rows = 1
        while rows <= most_rows:
            columns = min(parts // rows, self._panels)
            rows = min(parts // columns, most_rows)
            grid = self._grid(rows, columns)
            if grid.cost < best.cost:
                best = grid
            rows += 1
        if self.m == 0 or self.problem.n == 0:
            return best
        bands, most_bands = 1, 1 if parts < _LEAST_PARTS_OF_BANDS else most_rows
        while bands <= most_bands:
            in_order = self._in_order(parts, bands)
            if in_order.cost < best.cost:
                best = in_order
            bands *= 4
        return best

    def _place(self, bands: int, part: int, parts: int) -> tuple[int, int, int]:
        """Return where a part begins that has tile after tile: the band, the panel and the tile."""
        if part == parts:
            return bands, 0, 0
        nr, tiles = self.candidate.micro_kernel.nr, self._tiles
        columns = tiles * self._width * part // parts
        band = (bands * (columns // self._width + 1) - 1) // tiles
        top, bottom = tiles * band // bands, tiles * (band + 1) // bands
        of_panels = columns - top * self._width
        panel = of_panels // ((bottom - top) * nr)
        width = min(nr, self._width - panel * nr)
        tile = (of_panels - panel * (bottom - top) * nr + width // 2) // width
        return band, panel, tile

    def _piece(self, tiles: tuple[int, int], panels: tuple[int, int]) -> Iterator[Piece]:
        if tiles[0] < tiles[1] and panels[0] < panels[1]:
            tile = self.candidate.micro_kernel
            yield Piece(
                row_begin=min(tiles[0] * tile.mr, self.m),
                row_end=min(tiles[1] * tile.mr, self.m),
                column_begin=min(panels[0] * tile.nr, self.problem.n),
                column_end=min(panels[1] * tile.nr, self.problem.n),
            )
