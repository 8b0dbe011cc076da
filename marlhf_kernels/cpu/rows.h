// Sequences of tokens in both layouts, and the action tokens of one of them side by side.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>

#include "api.h"
#include "parallel.h"
#include "simd.h"

namespace marlhf::MARLHF_ISA {
namespace {

// What an entry point returns.
enum Status : int { OK, BROKEN_OFFSETS, TOO_LONG, NO_MEMORY };

// For the lambdas that a loop by lanes is made of.
#define MARLHF_INLINE_BODY __attribute__((always_inline))

// Calls body(i, lanes) for i = 0, LANES, ... with the number of lanes that are inside of n.
template <typename Body>
MARLHF_INLINE void by_lanes(std::int32_t n, const Body& body) {
    std::int32_t i = 0;
    for (; i + LANES <= n; i += LANES) body(i, LANES);
    if (i < n) body(i, n - i);
}

// 0 in the other lanes.
template <typename T>
MARLHF_INLINE Float load_lanes(const T* from, int lanes) {
    return lanes == LANES ? load(from) : load_first(from, lanes);
}

template <typename T>
MARLHF_INLINE void store_lanes(T* to, Float x, int lanes) {
    if (lanes == LANES)
        store(to, x);
    else
        store_first(to, x, lanes);
}

template <typename To, typename From>
void convert(const From* from, To* to, std::int32_t n) {
    by_lanes(n, [&](std::int32_t i, int lanes) MARLHF_INLINE_BODY {
        store_lanes(to + i, load_lanes(from + i, lanes), lanes);
    });
}

// A tensor whose last axis is contiguous: `stride` counts elements from one row to the next.
struct Tensor {
    const void* data;
    std::int64_t type;
    std::int64_t stride;
};

inline float element(const Tensor& x, std::int64_t at) {
    switch (x.type) {
        case BFLOAT16: return load_one(static_cast<const BFloat16*>(x.data) + at);
        case FLOAT16: return load_one(static_cast<const Float16*>(x.data) + at);
        default: return static_cast<const float*>(x.data)[at];
    }
}

// Sequence `row` is a row of padded [rows, width] tensors, or, where `offsets` is given, the tokens
// [offsets[row], offsets[row + 1]) of packed ones.
struct Sequences {
    const std::int32_t* offsets;
    std::int64_t rows;
    std::int64_t width;
    std::int64_t num_tokens;
    std::int64_t threads;

    std::int64_t begin(std::int64_t row) const { return offsets ? offsets[row] : row * width; }
    std::int64_t length(std::int64_t row) const { return offsets ? offsets[row + 1] - offsets[row] : width; }
    std::int64_t begin_in(const Tensor& x, std::int64_t row) const { return offsets ? offsets[row] : width ? row * x.stride : 0; }

    // Calls body(begin, end) for pieces of the rows, on several threads where there is enough to do.
    template <typename Body>
    void in_parallel(const Body& body) const {
        constexpr std::int64_t TOKENS_PER_PIECE = 16384;
        const std::int64_t per_row = std::max<std::int64_t>(num_tokens / std::max<std::int64_t>(rows, 1), 1);
        const std::int64_t grain = std::max<std::int64_t>(TOKENS_PER_PIECE / per_row, 1);
        parallel_for(rows, grain, static_cast<int>(threads), body);
    }

    std::int64_t end() const { return offsets ? offsets[rows] : num_tokens; }

    // Every entry point asks this before it reads a token.
    Status check() const {
        if (!offsets) return width < std::numeric_limits<std::int32_t>::max() ? OK : TOO_LONG;
        if (offsets[0] != 0) return BROKEN_OFFSETS;
        for (std::int64_t row = 0; row < rows; ++row)
            if (offsets[row + 1] < offsets[row]) return BROKEN_OFFSETS;
        return offsets[rows] <= num_tokens ? OK : BROKEN_OFFSETS;
    }

    std::int64_t longest() const {
        std::int64_t result = offsets ? 0 : width;
        if (offsets)
            for (std::int64_t row = 0; row < rows; ++row) result = std::max(result, length(row));
        return result;
    }
};

// What follows the last packed sequence belongs to none: its results are 0.
inline void clear_tail(const Sequences& sequences, void* result, std::int64_t size) {
    const std::int64_t end = sequences.end();
    if (end == sequences.num_tokens) return;
    std::memset(static_cast<char*>(result) + end * size, 0, static_cast<std::size_t>((sequences.num_tokens - end) * size));
}

// Uninitialised memory; null where there is none left.
template <typename T>
class Buffer {
   public:
    explicit Buffer(std::int64_t size)
        : data_(static_cast<T*>(std::malloc(static_cast<std::size_t>(std::max<std::int64_t>(size, 1)) * sizeof(T)))) {}
    ~Buffer() { std::free(data_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    explicit operator bool() const { return data_ != nullptr; }
    T& operator[](std::int64_t at) const { return data_[at]; }

   private:
    T* data_;
};

// What one thread works in: arrays as long as the longest sequence, with room for one number more.
class Scratch {
   public:
    Scratch(std::int64_t longest, int arrays) : length_(longest + 1), memory_(length_ * arrays) {}

    explicit operator bool() const { return static_cast<bool>(memory_); }

    template <typename T>
    T* take() {
        static_assert(sizeof(T) == sizeof(std::int32_t));
        return reinterpret_cast<T*>(&memory_[length_ * taken_++]);
    }

   private:
    std::int64_t length_;
    Buffer<std::int32_t> memory_;
    int taken_ = 0;
};

// An id above its position cannot be one: it counts as -1, so that no id leads outside of the row.
inline bool is_action(std::int64_t id, std::int64_t position) { return id >= 0 && id <= position; }

// The action tokens of one sequence, those of the same macro action side by side and in order.
//
// They stand in the order of the sequence where its ids are as they should be; ids that are not are sorted.
class Actions {
   public:
    static constexpr int ARRAYS = 6;

    explicit Actions(Scratch& scratch)
        : starts_(scratch.take<std::int32_t>()), own_places_(scratch.take<std::int32_t>()),
          ids_(scratch.take<std::int32_t>()), sorted_(scratch.take<std::int32_t>()),
          slots_(scratch.take<std::int32_t>()), ends_(scratch.take<std::int32_t>()) {}

    void read(const Sequences& sequences, const Tensor& ids, std::int64_t row) {
        length_ = sequences.length(row);
        const std::int64_t begin = sequences.begin_in(ids, row);
        if (ids.type == INT32)
            read(static_cast<const std::int32_t*>(ids.data) + begin);
        else
            read(static_cast<const std::int64_t*>(ids.data) + begin);
    }

    std::int32_t count() const { return count_; }
    // Macro actions that have a token.
    std::int32_t macros() const { return macros_; }
    std::int32_t start(std::int32_t macro) const { return starts_[macro]; }
    std::int32_t length(std::int32_t macro) const { return starts_[macro + 1] - starts_[macro]; }
    std::int64_t id(std::int32_t macro) const { return orderly_ ? macro : slots_[macro]; }
    // The one that stands last in the sequence; there must be one.
    std::int32_t last() const { return last_; }

    // The numbers of `x` at the action tokens of sequence `row`; `space` may be used to hold them.
    const float* values(const Sequences& sequences, const Tensor& x, std::int64_t row, float* space) const {
        const std::int64_t begin = sequences.begin_in(x, row);
        if (x.type == FLOAT32) {
            const float* source = static_cast<const float*>(x.data) + begin;
            if (adjacent_) return source + first_;
            collect(source, space);
        } else if (x.type == BFLOAT16) {
            collect(static_cast<const BFloat16*>(x.data) + begin, space);
        } else {
            collect(static_cast<const Float16*>(x.data) + begin, space);
        }
        return space;
    }

    // Where to compute what `place` is to write to `target`: there, if the tokens stand side by side, else in `space`.
    float* results(float* target, float* space) const { return adjacent_ ? target + first_ : space; }

    // Writes one sequence of results, 0 where a token is no action.
    template <typename To>
    void place(const float* results, To* target) const {
        const To zero{};
        if (adjacent_) {
            std::fill(target, target + first_, zero);
            if (static_cast<const void*>(results) != static_cast<const void*>(target + first_))
                convert(results, target + first_, count_);
            std::fill(target + first_ + count_, target + length_, zero);
        } else {
            std::fill(target, target + length_, zero);
            for (std::int32_t i = 0; i < count_; ++i) store_one(target + places_[i], results[i]);
        }
    }

    // The place in the sequence of an action token.
    std::int32_t at(std::int32_t token) const { return adjacent_ ? first_ + token : places_[token]; }

   private:
    template <typename From>
    void collect(const From* source, float* space) const {
        if (adjacent_)
            convert(source + first_, space, count_);
        else
            for (std::int32_t i = 0; i < count_; ++i) space[i] = load_one(source + places_[i]);
    }

    template <typename Id>
    void read(const Id* ids) {
        std::int32_t first = 0, end = static_cast<std::int32_t>(length_);
        while (first < end && !is_action(ids[first], first)) ++first;
        while (end > first && !is_action(ids[end - 1], end - 1)) --end;
        first_ = first;
        count_ = end - first;
        last_ = count_ - 1;
        adjacent_ = orderly_ = rises_by_steps(ids + first, count_);
        if (orderly_) {
            mark_starts(ids + first);
            return;
        }
        count_ = 0;
        for (std::int32_t position = first; position < end; ++position) {
            own_places_[count_] = position;
            ids_[count_] = static_cast<std::int32_t>(ids[position]);
            count_ += is_action(ids[position], position);
        }
        last_ = count_ - 1;
        places_ = own_places_;
        orderly_ = rises_by_steps(ids_, count_);
        if (orderly_)
            mark_starts(ids_);
        else
            sort();
    }

    template <typename Id>
    static bool rises_by_steps(const Id* ids, std::int32_t count) {
        if (count == 0) return true;
        using Unsigned = std::make_unsigned_t<Id>;
        Unsigned broken = static_cast<Unsigned>(ids[0]);
        for (std::int32_t i = 1; i < count; ++i)  // a rise by 0 or 1 has no bit above the lowest
            broken |= (static_cast<Unsigned>(ids[i]) - static_cast<Unsigned>(ids[i - 1])) >> 1;
        return broken == 0;
    }

    template <typename Id>
    void mark_starts(const Id* ids) {
        const std::int32_t count = count_, macros = count ? static_cast<std::int32_t>(ids[count - 1]) + 1 : 0;
        std::int32_t* starts = starts_;
        for (std::int32_t i = count - 1; i >= 0; --i) starts[ids[i]] = i;
        starts[macros] = count;
        macros_ = macros;
    }

    // Counting sort by id, which keeps the order inside a macro action.
    void sort() {
        const std::int32_t ids = 1 + *std::max_element(ids_, ids_ + count_);
        std::fill(ends_, ends_ + ids, 0);
        for (std::int32_t i = 0; i < count_; ++i) ++ends_[ids_[i]];
        macros_ = 0;
        std::int32_t before = 0;
        for (std::int32_t id = 0; id < ids; ++id) {
            const std::int32_t length = ends_[id];
            ends_[id] = before;
            if (length) {
                starts_[macros_] = before;
                slots_[macros_++] = id;
            }
            before += length;
        }
        starts_[macros_] = count_;
        for (std::int32_t i = 0; i < count_; ++i) {
            last_ = ends_[ids_[i]]++;
            sorted_[last_] = own_places_[i];
        }
        places_ = sorted_;
    }

    std::int64_t length_ = 0;
    std::int32_t first_ = 0, count_ = 0, macros_ = 0, last_ = -1;
    bool adjacent_ = true, orderly_ = true;
    std::int32_t *starts_, *own_places_, *ids_, *sorted_, *slots_, *ends_;
    const std::int32_t* places_ = nullptr;
};

// Calls `visit(row, actions, space)` for every sequence, on several threads where there is enough to do; `space` is
// Arrays arrays to work with.
template <int Arrays, typename Visit>
Status for_each_sequence(const Sequences& sequences, const Tensor& ids, const Visit& visit) {
    if (const Status status = sequences.check()) return status;
    const std::int64_t longest = sequences.longest();
    std::atomic<bool> complete{true};
    sequences.in_parallel([&](std::int64_t begin, std::int64_t end) {
        Scratch scratch(longest, Actions::ARRAYS + Arrays);
        if (!scratch) {
            complete.store(false, std::memory_order_relaxed);
            return;
        }
        Actions actions(scratch);
        float* space[Arrays + 1];
        for (int i = 0; i < Arrays; ++i) space[i] = scratch.take<float>();
        for (std::int64_t row = begin; row < end; ++row) {
            actions.read(sequences, ids, row);
            visit(row, actions, space);
        }
    });
    return complete ? OK : NO_MEMORY;
}

}  // namespace
}  // namespace marlhf::MARLHF_ISA
