// Work on the rows of a step, shared out among threads. Free of OpenVINO.
#pragma once

#include <algorithm>

#include "linear/kernel.hpp"
#include "native/pool.hpp"

namespace plancast::block {

// body(row) for each row, on at most `threads` threads.
template <typename Body>
void each_row(size_t rows, size_t threads, const Body& body) {
    const size_t parts = rows < linear::kRowsOfOne ? 1 : std::min(rows, 4 * threads);
    parallel(parts, threads, [&](size_t index) {
        const Part part(rows, index, parts);
        for (size_t row = part.first; row < part.last; ++row)
            body(row);
    });
}

}  // namespace plancast::block
