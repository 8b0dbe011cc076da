// Loops over independent items on the threads of the OpenMP runtime that torch brings.

#pragma once

#include <cstdint>

namespace marlhf {

using Piece = void (*)(const void* body, std::int64_t begin, std::int64_t end);

void run_pieces(Piece piece, const void* body, std::int64_t count, std::int64_t grain, int threads);

// Calls body(begin, end) for the pieces [0, grain), [grain, 2 grain), ... of [0, count), each once, on up to `threads`
// threads in no order. The pieces depend on `grain` alone: what is written per item or per piece has the same bits for
// any number of threads. A reduction writes one partial per piece, and the caller adds them up in order afterwards.
template <typename Body>
void parallel_for(std::int64_t count, std::int64_t grain, int threads, const Body& body) {
    run_pieces(
        [](const void* self, std::int64_t begin, std::int64_t end) { (*static_cast<const Body*>(self))(begin, end); },
        &body, count, grain, threads);
}

}  // namespace marlhf
