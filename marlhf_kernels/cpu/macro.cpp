// Reductions over macro actions. A sequence is row `b` of a padded [rows, width] tensor, or, where `offsets` is given,
// the tokens [offsets[b], offsets[b + 1]) of a packed one.

#include <algorithm>
#include <cstdint>

#include "api.h"

namespace marlhf::MARLHF_ISA {
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

// Status 1: the offsets are no offsets.
MARLHF_FUNCTION(max_macro_id)(int id_type, const void* ids, std::int64_t num_tokens, const std::int32_t* offsets,
                              std::int64_t rows, std::int64_t width, std::int64_t* largest) {
    const Sequences sequences{offsets, rows, width};
    return id_type == INT32 ? max_macro_id(static_cast<const std::int32_t*>(ids), num_tokens, sequences, largest)
                            : max_macro_id(static_cast<const std::int64_t*>(ids), num_tokens, sequences, largest);
}

// `lengths` is [rows, num_macros], all zeros; the sequences have passed max_macro_id.
MARLHF_FUNCTION(macro_lengths)(int id_type, const void* ids, const std::int32_t* offsets, std::int64_t rows,
                               std::int64_t width, std::int64_t num_macros, std::int32_t* lengths) {
    const Sequences sequences{offsets, rows, width};
    if (id_type == INT32)
        macro_lengths(static_cast<const std::int32_t*>(ids), sequences, num_macros, lengths);
    else
        macro_lengths(static_cast<const std::int64_t*>(ids), sequences, num_macros, lengths);
    return 0;
}

}  // namespace marlhf::MARLHF_ISA
