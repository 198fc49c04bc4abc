#include "native/pool.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace plancast {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr auto kWorthWaking = std::chrono::microseconds(20);
constexpr auto kLost = std::chrono::microseconds(500);  // beyond what an uneven share of work explains
constexpr int kAlone = 16;  // times as long as was lost
constexpr auto kLongestAlone = std::chrono::milliseconds(250);
constexpr uint64_t kClosed = 0xffffffffu;  // in place of the next task: there are none
constexpr int kPauses = 64;  // between two looks at the clock
constexpr size_t kMostAhead = 256 << 10;  // bytes that a thread asks for: a part of its second-level cache

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

// What a thread asks memory for while it waits.
class Reader {
public:
    void follow(const uint8_t* data, size_t bytes, size_t thread) {
        if (data == of_)
            return;
        of_ = data;
        at_ = reinterpret_cast<uintptr_t>(data) + thread * bytes;
        stop_ = at_ + std::min(bytes, kMostAhead);
    }
    void ask() {
        if (at_ >= stop_)
            return pause();
        for (int line = 0; line < 2; ++line, at_ += 64)
            __builtin_prefetch(reinterpret_cast<const void*>(at_), 0, 2);
    }

private:
    const uint8_t* of_ = nullptr;
    uintptr_t at_ = 0, stop_ = 0;
};

// The job stands in the pool itself, in one cache line: between two cores a line takes a quarter of a microsecond, and a
// job is handed out hundreds of times a step. So the caller writes that line and goes on, without a word to wait for, to
// task 0, which is its own; it counts what it does itself, and others what they do.
//
// `ticket` holds the job's number (upper half) and the next task (lower half): a worker that comes late fails to take a task
// of a job that is over, because the ticket has changed. The fields are only written when every task of the job before has
// been taken and done, and the ticket is closed.
class Pool {
public:
    void run(size_t tasks, size_t threads, pool::Task task, const void* context, const Upcoming& upcoming) {
        if (threads > 1 && tasks > 1 && !inside && busy_.try_lock()) {
            const auto begin = Clock::now();
            if (begin < alone_until_) {
                busy_.unlock();
                return alone(tasks, task, context);
            }
            grow(threads - 1);
            // Closed first: a worker that still looks for a task of the job before must not take one by the new count.
            const uint64_t before = ticket_.load(std::memory_order_relaxed) >> 32, job = before + 1;
            ticket_.store(before << 32 | kClosed, std::memory_order_release);
            task_.store(task, std::memory_order_release);
            context_.store(context, std::memory_order_release);
            tasks_.store(static_cast<uint32_t>(tasks), std::memory_order_release);
            helpers_.store(static_cast<uint32_t>(threads - 1), std::memory_order_release);
            if (upcoming.data) {
                upcoming_.store(upcoming.data, std::memory_order_relaxed);
                upcoming_bytes_.store(upcoming.bytes, std::memory_order_relaxed);
            }
            ticket_.store(job << 32 | 1, std::memory_order_release);
            // One that falls asleep at this very moment may be overlooked: it helps with the next job.
            const bool asleep = sleepers_.load(std::memory_order_relaxed) > 0;
            inside = true;
            task(context, 0);
            // Waking takes its time, too.
            if (asleep && (Clock::now() - begin) * static_cast<int64_t>(tasks - 1) >= kWorthWaking)
                wake();
            const size_t mine = 1 + take(job);
            inside = false;
            finish(static_cast<uint32_t>(tasks - mine), begin, mine);
            busy_.unlock();
            return;
        }
        alone(tasks, task, context);
    }

private:
    static void alone(size_t tasks, pool::Task task, const void* context) {
        for (size_t index = 0; index < tasks; ++index)
            task(context, index);
    }

    void wake() {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }

    // Takes tasks of `job` until none is left, and calls `after` after each; returns how many.
    template <typename After>
    size_t take(uint64_t job, const After& after) {
        uint64_t seen = ticket_.load(std::memory_order_acquire);
        size_t taken = 0;
        while (seen >> 32 == (job & 0xffffffffu)) {
            const auto index = static_cast<uint32_t>(seen);
            const pool::Task task = task_.load(std::memory_order_acquire);
            const void* context = context_.load(std::memory_order_acquire);
            if (index == kClosed || index >= tasks_.load(std::memory_order_acquire))
                break;
            if (!ticket_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel, std::memory_order_acquire))
                continue;
            task(context, index);
            ++taken;
            after();
            seen = ticket_.load(std::memory_order_acquire);
        }
        return taken;
    }
    size_t take(uint64_t job) {
        return take(job, [] {});
    }
    void help(uint64_t job) {
        take(job, [this] {
            done_.fetch_add(1, std::memory_order_seq_cst);
            if (waits_.load(std::memory_order_seq_cst)) {
                std::lock_guard<std::mutex> lock(mutex_);
                over_.notify_one();
            }
        });
    }

    void work(uint32_t number) {
        inside = true;
        uint64_t last = 0;
        Reader reader;
        for (;;) {
            follow(reader, number + 1);
            const uint64_t job = await(last, reader);
            last = job;
            if (number < helpers_.load(std::memory_order_relaxed))
                help(job);
        }
    }

    // Returns when others have done the `tasks` that they took; this thread did `mine` since `begin`. If one has lost its
    // CPU, this one sleeps (to yield would give a whole time slice away each time), and then does without them for a while:
    // two that wait for each other are slower on busy CPUs than one.
    void finish(uint32_t tasks, Clock::time_point begin, size_t mine) {
        expected_ += tasks;
        const auto done = [&] { return done_.load(std::memory_order_seq_cst) == expected_; };
        if (done())
            return;
        const auto end = Clock::now();
        follow(reader_, 0);
        if (spin(done, reader_))
            return;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            waits_.store(true, std::memory_order_seq_cst);
            over_.wait(lock, done);
            waits_.store(false, std::memory_order_seq_cst);
        }
        const auto now = Clock::now();
        const auto waited = now - end;
        if (waited > kLost + 2 * (end - begin) / static_cast<int64_t>(mine))
            alone_until_ = now + std::min<Clock::duration>(kAlone * waited, kLongestAlone);
    }

    void follow(Reader& reader, size_t thread) const {
        reader.follow(upcoming_.load(std::memory_order_relaxed), upcoming_bytes_.load(std::memory_order_relaxed), thread);
    }

    // The number of a job that is not `last`.
    uint64_t await(uint64_t last, Reader& reader) {
        const auto begun = [&] { return ticket_.load(std::memory_order_seq_cst) >> 32 != last; };
        if (!spin(begun, reader)) {
            std::unique_lock<std::mutex> lock(mutex_);
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, begun);
            sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        }
        return ticket_.load(std::memory_order_acquire) >> 32;
    }

    // Waits a little for `over`: whether it came.
    template <typename Over>
    static bool spin(const Over& over, Reader& reader) {
        const auto end = Clock::now() + kSpin;
        do
            for (int i = 0; i < kPauses; ++i) {
                if (over())
                    return true;
                reader.ask();
            }
        while (Clock::now() < end);
        return false;
    }

    void grow(size_t wanted) {
        for (; workers_ < wanted; ++workers_) {
            try {
                // Detached and never ended: they sleep when idle, and die with the process. The library stays loaded.
                std::thread(&Pool::work, this, static_cast<uint32_t>(workers_)).detach();
            } catch (const std::system_error&) {
                return;  // no more threads to be had: the others do the work
            }
        }
    }

    static thread_local bool inside;
    std::mutex busy_, mutex_;
    std::condition_variable wake_, over_;
    size_t workers_ = 0;
    Reader reader_;  // the caller's
    uint32_t expected_ = 0;  // what `done_` is when no task is under way
    Clock::time_point alone_until_{};
    alignas(64) std::atomic<uint64_t> ticket_{0};
    std::atomic<pool::Task> task_{nullptr};
    std::atomic<const void*> context_{nullptr};
    std::atomic<uint32_t> tasks_{0}, helpers_{0};
    std::atomic<const uint8_t*> upcoming_{nullptr};
    std::atomic<size_t> upcoming_bytes_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> waits_{false};
    alignas(64) std::atomic<uint32_t> done_{0};  // tasks that workers have done since the beginning, modulo 2^32
};

thread_local bool Pool::inside = false;

alignas(Pool) unsigned char storage[sizeof(Pool)];

Pool* make() {
    return new (storage) Pool;
}

// Never destroyed: workers may still look at it while the process ends.
Pool& the_pool() {
    static Pool* const pool = [] {
#if defined(__linux__)
        // A forked child has none of the threads: it begins anew.
        pthread_atfork(nullptr, nullptr, [] { make(); });
#endif
        return make();
    }();
    return *pool;
}

}  // namespace

size_t usable_cpus() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return static_cast<size_t>(CPU_COUNT(&set));
#endif
    return std::max(1u, std::thread::hardware_concurrency());
}

namespace pool {

void run(size_t tasks, size_t threads, Task task, const void* context, const Upcoming& upcoming) {
    the_pool().run(tasks, threads, task, context, upcoming);
}

}  // namespace pool

}  // namespace plancast
