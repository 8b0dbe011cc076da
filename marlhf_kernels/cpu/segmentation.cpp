// Builders of macro-action ids from a mask of response tokens.

#include "rows.h"

namespace marlhf::MARLHF_ISA {
namespace {

// Tensors of bytes are masks: true where a byte is not 0.
const std::uint8_t* mask_of(const Sequences& sequences, const Tensor& mask, std::int64_t row) {
    return static_cast<const std::uint8_t*>(mask.data) + sequences.begin_in(mask, row);
}

// Calls `build(row, length, mask, ids)` for every sequence; it fills in the ids.
template <typename Build>
Status build_ids(const Sequences& sequences, const Tensor& mask, std::int32_t* ids, const Build& build) {
    if (const Status status = sequences.check()) return status;
    sequences.in_parallel([&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row)
            build(row, sequences.length(row), mask_of(sequences, mask, row), ids + sequences.begin(row));
    });
    std::fill(ids + sequences.end(), ids + sequences.num_tokens, -1);
    return OK;
}

}  // namespace

struct FixedNgramArguments {
    Sequences sequences;
    Tensor mask;
    std::int64_t n;
    std::int32_t* ids;
};

MARLHF_FUNCTION(fixed_ngram)(const FixedNgramArguments* arguments) {
    const FixedNgramArguments& a = *arguments;
    return build_ids(a.sequences, a.mask, a.ids,
                     [&a](std::int64_t, std::int64_t length, const std::uint8_t* mask, std::int32_t* ids) {
                         std::int32_t id = 0;
                         std::int64_t left = a.n;
                         for (std::int64_t position = 0; position < length; ++position) {
                             if (!mask[position]) {
                                 ids[position] = -1;
                                 continue;
                             }
                             if (left == 0) {
                                 ++id;
                                 left = a.n;
                             }
                             ids[position] = id;
                             --left;
                         }
                     });
}

struct FromEndsArguments {
    Sequences sequences;
    Tensor mask, ends;
    std::int32_t* ids;
};

MARLHF_FUNCTION(from_ends)(const FromEndsArguments* arguments) {
    const FromEndsArguments& a = *arguments;
    return build_ids(a.sequences, a.mask, a.ids,
                     [&a](std::int64_t row, std::int64_t length, const std::uint8_t* mask, std::int32_t* ids) {
                         const std::uint8_t* ends = mask_of(a.sequences, a.ends, row);
                         std::int32_t id = 0;
                         for (std::int64_t position = 0; position < length; ++position) {
                             ids[position] = mask[position] ? id : -1;
                             id += mask[position] && ends[position];
                         }
                     });
}

struct FromBoundsArguments {
    Sequences sequences;
    Tensor mask, bounds;  // bounds int64 [rows, num_bounds]: the rank of the first token after each macro action
    std::int64_t num_bounds;
    std::int32_t* ids;
};

MARLHF_FUNCTION(from_bounds)(const FromBoundsArguments* arguments) {
    const FromBoundsArguments& a = *arguments;
    return build_ids(a.sequences, a.mask, a.ids,
                     [&a](std::int64_t row, std::int64_t length, const std::uint8_t* mask, std::int32_t* ids) {
                         const auto* bounds = static_cast<const std::int64_t*>(a.bounds.data) + row * a.bounds.stride;
                         std::int64_t id = 0, rank = 0;
                         for (std::int64_t position = 0; position < length; ++position) {
                             if (!mask[position]) {
                                 ids[position] = -1;
                                 continue;
                             }
                             while (id < a.num_bounds && bounds[id] <= rank) ++id;
                             ids[position] = static_cast<std::int32_t>(id);
                             ++rank;
                         }
                     });
}

struct PerplexityArguments {
    Sequences sequences;
    Tensor mask, ref_logprobs;
    std::int64_t neighbour;  // compare with the token before, not with the mean so far
    std::int32_t* ids;
};

MARLHF_FUNCTION(perplexity)(const PerplexityArguments* arguments) {
    const PerplexityArguments& a = *arguments;
    return build_ids(a.sequences, a.mask, a.ids,
                     [&a](std::int64_t row, std::int64_t length, const std::uint8_t* mask, std::int32_t* ids) {
                         const std::int64_t begin = a.sequences.begin_in(a.ref_logprobs, row);
                         std::int32_t id = -1;
                         float total = 0, number = 0;
                         for (std::int64_t position = 0; position < length; ++position) {
                             if (!mask[position]) {
                                 ids[position] = -1;
                                 continue;
                             }
                             // Every backend computes nll n > sum in float32 and in order: a division would round
                             // differently.
                             const float nll = -element(a.ref_logprobs, begin + position);
                             const bool opens = id < 0 || nll * number > total;
                             id += opens;
                             if (opens || a.neighbour) {
                                 total = nll;
                                 number = 1;
                             } else {
                                 total += nll;
                                 number += 1;
                             }
                             ids[position] = id;
                         }
                     });
}

struct IsolateLastArguments {
    Sequences sequences;
    Tensor ids;
    std::int32_t* result;
};

MARLHF_FUNCTION(isolate_last)(const IsolateLastArguments* arguments) {
    const IsolateLastArguments& a = *arguments;
    const Status status =
        for_each_sequence<0>(a.sequences, a.ids, [&a](std::int64_t row, const Actions& actions, float**) {
            std::int32_t* result = a.result + a.sequences.begin(row);
            std::fill_n(result, a.sequences.length(row), -1);
            for (std::int32_t macro = 0; macro < actions.macros(); ++macro)
                for (std::int32_t i = actions.start(macro); i < actions.start(macro + 1); ++i)
                    result[actions.at(i)] = static_cast<std::int32_t>(
                        actions.id(macro) + (i == actions.last() && actions.length(macro) > 1));
        });
    if (status != OK) return status;
    std::fill(a.result + a.sequences.end(), a.result + a.sequences.num_tokens, -1);
    return OK;
}

}  // namespace marlhf::MARLHF_ISA
