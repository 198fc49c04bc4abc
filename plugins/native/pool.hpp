// The one pool of threads that every kernel of ours shares. Free of OpenVINO.
#pragma once

#include <cstddef>
#include <cstdint>

namespace plancast {

// Memory that a later call will read: thread n of it, where the caller is thread 0, from data + n * bytes on. Who waits asks
// for its part meanwhile. Only ever prefetched: it need not be there any more.
struct Upcoming {
    const uint8_t* data = nullptr;
    size_t bytes = 0;
};

// Threads that this process may use: the CPUs that it is bound to.
size_t usable_cpus();

namespace pool {
using Task = void (*)(const void* context, size_t index);
void run(size_t tasks, size_t threads, Task task, const void* context, const Upcoming& upcoming);
}  // namespace pool

// body(index) for each index in [0, tasks), on at most `threads` threads, the caller among them; returns when all are
// done. Tasks are taken in order, one at a time, by whoever is free: a thread that the system holds back holds nobody
// up, and the caller can do them all. What a task computes must not depend on who runs it, which also makes results the
// same for any number of threads. A call from inside a task, or while another thread's call runs, does its tasks alone.
// Tasks must not throw, nor wait for one another.
//
// Who waits, for a call or for its last tasks, spins for 0.05 ms and then sleeps; nobody yields. `upcoming`: what to read in
// that time, from this call on; without it, still what a call before said.
template <typename Body>
void parallel(size_t tasks, size_t threads, const Body& body, const Upcoming& upcoming = {}) {
    pool::run(
        tasks, threads, [](const void* context, size_t index) { (*static_cast<const Body*>(context))(index); }, &body,
        upcoming);
}

// The range [first, last) of part `index` when `count` items are cut into `parts` even parts, the larger ones first: threads
// that take two each then have as much to do as the others.
struct Part {
    size_t first, last;
    Part(size_t count, size_t index, size_t parts) : first(begin(count, index, parts)), last(begin(count, index + 1, parts)) {}

private:
    static size_t begin(size_t count, size_t index, size_t parts) {
        const size_t more = count % parts;
        return index * (count / parts) + (index < more ? index : more);
    }
};

}  // namespace plancast
