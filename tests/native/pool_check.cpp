// The pool of threads: each task once, from several threads at a time, nested; with CHECK_IDLE no time is burnt when idle,
// and a forked child can work too.
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "native/pool.hpp"

namespace {

double cpu_seconds() {
    timespec spent;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &spent);
    return static_cast<double>(spent.tv_sec) + 1e-9 * static_cast<double>(spent.tv_nsec);
}

long work(size_t threads, int calls) {
    std::atomic<long> total{0};
    for (int i = 0; i < calls; ++i)
        plancast::parallel(7, threads, [&](size_t index) {
            total += static_cast<long>(index);
            if (index == 3)
                plancast::parallel(2, 2, [&](size_t) { total += 1; });
        });
    return total;
}

// Jobs of few and of many tasks in turn: a worker that looks for more of one must get none of the next before its time.
bool counts_right(int calls) {
    for (int i = 0; i < calls; ++i) {
        const size_t tasks = i % 2 ? 64 : 2;
        std::vector<std::atomic<int>> taken(tasks);
        plancast::parallel(tasks, 3, [&](size_t index) { ++taken[index]; });
        for (const auto& one : taken)
            if (one != 1)
                return false;
    }
    return true;
}

}  // namespace

int main() {
    constexpr int kCalls = 2000;
    constexpr long kExpected = 23L * kCalls;
    for (const size_t threads : {1, 2, 5, 64})
        if (work(threads, kCalls) != kExpected)
            return std::printf("wrong on %zu threads\n", threads), 1;
    if (!counts_right(200'000))
        return std::printf("a task was taken twice, or not at all\n"), 1;
    std::vector<std::thread> callers;
    std::atomic<int> wrong{0};
    for (int i = 0; i < 3; ++i)
        callers.emplace_back([&] { wrong += work(3, kCalls) != kExpected; });
    for (auto& caller : callers)
        caller.join();
    if (wrong)
        return std::printf("wrong from several threads\n"), 1;
#ifdef CHECK_IDLE
    usleep(50'000);
    const double before = cpu_seconds();
    usleep(300'000);
    if (cpu_seconds() - before > 0.03)
        return std::printf("idle, and burnt %.3f s in 0.3\n", cpu_seconds() - before), 1;
    const pid_t child = fork();
    if (child == 0)
        _exit(work(2, kCalls) == kExpected ? 0 : 1);
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0)
        return std::printf("a forked child failed: %d\n", status), 1;
#endif
    return 0;
}
