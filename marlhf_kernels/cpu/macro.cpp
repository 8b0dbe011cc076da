// Reductions over macro actions. A sequence is row `b` of a padded [rows, width] tensor, or, where `offsets` is given,
// the tokens [offsets[b], offsets[b + 1]) of a packed one.

#include <algorithm>
#include <cstdint>

namespace {

struct Sequences {
    const std::int32_t* offsets;
    std::int64_t rows;
    std::int64_t width;

    std::int64_t begin(std::int64_t row) const { return offsets ? offsets[row] : row * width; }
    std::int64_t end(std::int64_t row) const { return offsets ? offsets[row + 1] : (row + 1) * width; }

    bool valid(std::int64_t num_tokens) const {
        if (!offsets) return rows * width == num_tokens;
        if (offsets[0] != 0) return false;
        for (std::int64_t row = 0; row < rows; ++row)
            if (offsets[row + 1] < offsets[row]) return false;
        return offsets[rows] <= num_tokens;
    }
};

// An id above its position cannot be one: it counts as -1, so that no id leads outside of the row.
inline bool is_action(std::int64_t id, std::int64_t position) { return id >= 0 && id <= position; }

template <typename Id>
int max_macro_id(const Id* ids, std::int64_t num_tokens, const Sequences& sequences, std::int64_t* largest) {
    if (!sequences.valid(num_tokens)) return 1;
    std::int64_t result = -1;
    for (std::int64_t row = 0; row < sequences.rows; ++row) {
        const std::int64_t begin = sequences.begin(row), end = sequences.end(row);
        for (std::int64_t token = begin; token < end; ++token)
            if (is_action(ids[token], token - begin)) result = std::max<std::int64_t>(result, ids[token]);
    }
    *largest = result;
    return 0;
}

template <typename Id>
void macro_lengths(const Id* ids, const Sequences& sequences, std::int64_t num_macros, std::int32_t* lengths) {
    for (std::int64_t row = 0; row < sequences.rows; ++row) {
        const std::int64_t begin = sequences.begin(row), end = sequences.end(row);
        std::int32_t* row_lengths = lengths + row * num_macros;
        for (std::int64_t token = begin; token < end; ++token) {
            const std::int64_t id = ids[token];
            if (is_action(id, token - begin) && id < num_macros) ++row_lengths[id];
        }
    }
}

}  // namespace

#define MARLHF_API extern "C" __attribute__((visibility("default")))

MARLHF_API int marlhf_max_macro_id_i32(const std::int32_t* ids, std::int64_t num_tokens, const std::int32_t* offsets,
                            std::int64_t rows, std::int64_t width, std::int64_t* largest) {
    return max_macro_id(ids, num_tokens, {offsets, rows, width}, largest);
}

MARLHF_API int marlhf_max_macro_id_i64(const std::int64_t* ids, std::int64_t num_tokens, const std::int32_t* offsets,
                            std::int64_t rows, std::int64_t width, std::int64_t* largest) {
    return max_macro_id(ids, num_tokens, {offsets, rows, width}, largest);
}

// `lengths` is [rows, num_macros], all zeros; the sequences have passed marlhf_max_macro_id_*.
MARLHF_API void marlhf_macro_lengths_i32(const std::int32_t* ids, std::int64_t, const std::int32_t* offsets, std::int64_t rows,
                              std::int64_t width, std::int64_t num_macros, std::int32_t* lengths) {
    macro_lengths(ids, {offsets, rows, width}, num_macros, lengths);
}

MARLHF_API void marlhf_macro_lengths_i64(const std::int64_t* ids, std::int64_t, const std::int32_t* offsets, std::int64_t rows,
                              std::int64_t width, std::int64_t num_macros, std::int32_t* lengths) {
    macro_lengths(ids, {offsets, rows, width}, num_macros, lengths);
}
