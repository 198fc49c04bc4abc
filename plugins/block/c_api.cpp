#include "block/c_api.hpp"

#include <cstdio>
#include <exception>
#include <vector>

#include "block/graph.hpp"

#if defined(__GNUC__)
#define PLANCAST_EXPORT __attribute__((visibility("default")))
#else
#define PLANCAST_EXPORT
#endif

using plancast::block::Graph;
using plancast::block::Program;
using plancast::block::Table;

struct PlancastGraph {
    explicit PlancastGraph(const std::vector<size_t>& widths) : graph(widths) {}
    Graph graph;
};

extern "C" {

PLANCAST_EXPORT PlancastGraph* plancast_graph_new(const uint64_t* widths, uint64_t count) {
    return new PlancastGraph(std::vector<size_t>(widths, widths + count));
}

PLANCAST_EXPORT void plancast_graph_free(PlancastGraph* graph) {
    delete graph;
}

PLANCAST_EXPORT uint64_t plancast_graph_look_up(PlancastGraph* graph, uint64_t type, const void* table, uint64_t width,
                                                const float* scales, uint64_t group, uint64_t ids) {
    return graph->graph.look_up({static_cast<Table::Type>(type), width, table, scales, group}, ids);
}

PLANCAST_EXPORT uint64_t plancast_graph_angles(PlancastGraph* graph, uint64_t sine, uint64_t positions,
                                               const float* frequencies, uint64_t count) {
    return graph->graph.angles(sine != 0, positions, frequencies, count);
}

PLANCAST_EXPORT uint64_t plancast_graph_take(PlancastGraph* graph, uint64_t value, uint64_t ids) {
    return graph->graph.take(value, ids);
}

PLANCAST_EXPORT uint64_t plancast_graph_norm(PlancastGraph* graph, uint64_t value, const float* gain, float epsilon) {
    return graph->graph.norm(value, gain, epsilon);
}

PLANCAST_EXPORT uint64_t plancast_graph_scale(PlancastGraph* graph, uint64_t value, float factor) {
    return graph->graph.scale(value, factor);
}

PLANCAST_EXPORT uint64_t plancast_graph_join(PlancastGraph* graph, const uint64_t* parts, uint64_t count) {
    return graph->graph.join(std::vector<size_t>(parts, parts + count));
}

PLANCAST_EXPORT uint64_t plancast_graph_block(PlancastGraph* graph, const char* text, const uint64_t* inputs,
                                              uint64_t count, const void* constants, char* error, uint64_t size) {
    try {
        return graph->graph.block(Program::parse(text), std::vector<size_t>(inputs, inputs + count), constants);
    } catch (const std::exception& reason) {
        std::snprintf(error, size, "%s", reason.what());
        return 0;
    }
}

PLANCAST_EXPORT void plancast_graph_give(PlancastGraph* graph, uint64_t value) {
    graph->graph.give(value);
}

PLANCAST_EXPORT void plancast_graph_run(PlancastGraph* graph, const void* const* data, const uint64_t* lengths,
                                        float* const* outputs, uint64_t threads) {
    graph->graph.run(data, lengths, outputs, threads);
}
}
