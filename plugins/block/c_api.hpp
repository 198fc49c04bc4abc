// What Python calls through ctypes: a model's graph (graph.hpp).
#pragma once

#include <cstdint>

extern "C" {

struct PlancastGraph;

// `widths`: of `count` inputs, in floats a row; 0 for one that is no rows.
PlancastGraph* plancast_graph_new(const uint64_t* widths, uint64_t count);
void plancast_graph_free(PlancastGraph* graph);

// Each adds a step and returns the first value that it makes.
// `type`: of block::Table; `scales`: null, or a scale every `group` columns.
uint64_t plancast_graph_look_up(PlancastGraph* graph, uint64_t type, const void* table, uint64_t width,
                                const float* scales, uint64_t group, uint64_t ids);
uint64_t plancast_graph_angles(PlancastGraph* graph, uint64_t sine, uint64_t positions, const float* frequencies,
                               uint64_t count);
uint64_t plancast_graph_take(PlancastGraph* graph, uint64_t value, uint64_t ids);
uint64_t plancast_graph_norm(PlancastGraph* graph, uint64_t value, const float* gain, float epsilon);
uint64_t plancast_graph_scale(PlancastGraph* graph, uint64_t value, float factor);
uint64_t plancast_graph_join(PlancastGraph* graph, const uint64_t* parts, uint64_t count);
// `text`: a block's program (op.py); where it is none, 0, and why, cut to `size` bytes, in `error`.
uint64_t plancast_graph_block(PlancastGraph* graph, const char* text, const uint64_t* inputs, uint64_t count,
                              const void* constants, char* error, uint64_t size);

// `value` is written to the next of the outputs.
void plancast_graph_give(PlancastGraph* graph, uint64_t value);

// `data`: of the inputs, `lengths` their first dimensions; `outputs`: room for [rows, width] each.
void plancast_graph_run(PlancastGraph* graph, const void* const* data, const uint64_t* lengths, float* const* outputs,
                        uint64_t threads);
}
