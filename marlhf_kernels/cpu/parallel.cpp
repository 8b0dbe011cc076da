#include "parallel.h"

#include <algorithm>
#include <atomic>

// Not linked: torch has loaded an OpenMP runtime by the time a kernel runs, and a second one would double the threads.
// Without one in the process (a test that loads the library alone) the address is null.
#ifdef __ELF__
extern "C" void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags)
    __attribute__((weak));
#else
static constexpr void (*GOMP_parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
#endif

namespace marlhf {

namespace {

struct Loop {
    Piece piece;
    const void* body;
    std::int64_t count;
    std::int64_t grain;
    std::int64_t pieces;
    std::atomic<std::int64_t> next{0};
};

// Every thread of the team takes pieces until none is left, so a team smaller than asked for still does all.
void take_pieces(void* data) {
    Loop& loop = *static_cast<Loop*>(data);
    std::int64_t number;
    while ((number = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.pieces) {
        const std::int64_t begin = number * loop.grain;
        loop.piece(loop.body, begin, std::min(begin + loop.grain, loop.count));
    }
}

}  // namespace

void run_pieces(Piece piece, const void* body, std::int64_t count, std::int64_t grain, int threads) {
    if (count <= 0) return;
    Loop loop{piece, body, count, grain, (count - 1) / grain + 1};
    const auto team = static_cast<unsigned>(std::min<std::int64_t>(threads, loop.pieces));
    if (team > 1 && GOMP_parallel != nullptr)
        GOMP_parallel(take_pieces, &loop, team, 0);
    else
        take_pieces(&loop);
}

}  // namespace marlhf
