// What the sampler calls through ctypes: passes over one row of logits. A row of n values is looked at as a matrix of
// lines of `columns` values each (the last one may be short); a chunk is a column of it.
#pragma once

#include <cstdint>

extern "C" {

// values[i] = 2^(row[i] * scale), right to 2e-7; below 2^-125: 0; above f32: infinity; NaN stays NaN.
// sums [columns]: the sum of each chunk, line by line. Returns the f64 sum of `sums`.
double plancast_exp2_chunks(const float* row, int64_t n, float scale, float* values, int64_t columns, float* sums);

// A superset, of few more, of the fewest largest values that reach `mass`: their positions, ascending, into ids [n].
// `values`, `sums` as plancast_exp2_chunks leaves them, `total` their sum. Returns how many there are.
int64_t plancast_nucleus(const float* values, int64_t n, int64_t columns, const float* sums, double total, double mass,
                         int64_t* ids);

// The positions, ascending, of all values that are no less than a bound: at least `k` values reach it, and it is no
// greater than the k-th largest; nor is it below the largest value plus `drop`. `k` <= columns. Into ids [n]; returns
// how many. `largest`: the largest value, NaN where there is one (then there are no positions). `scratch` [2 columns].
int64_t plancast_largest(const float* row, int64_t n, int64_t columns, int64_t k, double drop, float* scratch,
                         float* largest, int64_t* ids);

// The position of the largest of `n` > 0 values, the first among equals; of the first NaN where there is one. `share`: what
// exp of it is of the sum of exp of all.
int64_t plancast_likeliest(const float* row, int64_t n, float* share);
}
