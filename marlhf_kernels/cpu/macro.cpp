// Reductions over macro actions, and back.

#include "rows.h"
#include "weights.h"

namespace marlhf::MARLHF_ISA {
namespace {

template <typename Id>
std::int64_t max_macro_id(const Id* ids, std::int64_t length) {
    Id largest = -1;
    for (std::int64_t position = 0; position < length; ++position) {
        const Id id = ids[position] > static_cast<Id>(position) ? Id(-1) : ids[position];
        largest = std::max(largest, id);
    }
    return largest;
}

}  // namespace

struct MaxMacroIdArguments {
    Sequences sequences;
    Tensor ids;
    std::int64_t* largest;  // -1 where there is no action token
};

MARLHF_FUNCTION(max_macro_id)(const MaxMacroIdArguments* arguments) {
    const MaxMacroIdArguments& a = *arguments;
    if (const Status status = a.sequences.check()) return status;
    *a.largest = -1;
    for (std::int64_t row = 0; row < a.sequences.rows; ++row) {
        const std::int64_t begin = a.sequences.begin_in(a.ids, row), length = a.sequences.length(row);
        const std::int64_t found = a.ids.type == INT32
                                       ? max_macro_id(static_cast<const std::int32_t*>(a.ids.data) + begin, length)
                                       : max_macro_id(static_cast<const std::int64_t*>(a.ids.data) + begin, length);
        *a.largest = std::max(*a.largest, found);
    }
    return OK;
}

struct MacroLengthsArguments {
    Sequences sequences;
    Tensor ids;
    std::int64_t num_macros;
    std::int32_t* lengths;  // [rows, num_macros]
};

MARLHF_FUNCTION(macro_lengths)(const MacroLengthsArguments* arguments) {
    const MacroLengthsArguments& a = *arguments;
    const Status status = for_each_sequence<0>(a.sequences, a.ids, [&a](std::int64_t row, const Actions& actions, float**) {
        std::int32_t* lengths = a.lengths + row * a.num_macros;
        std::fill_n(lengths, a.num_macros, 0);
        for (std::int32_t macro = 0; macro < actions.macros(); ++macro)
            if (actions.id(macro) < a.num_macros) lengths[actions.id(macro)] = actions.length(macro);
    });
    if (status != OK) return status;
    return OK;
}

struct MacroReduceArguments {
    Sequences sequences;
    Tensor ids, x;
    Weights weights;
    double discount;
    std::int64_t num_macros;
    float* result;  // [rows, num_macros]
};

MARLHF_FUNCTION(macro_reduce)(const MacroReduceArguments* arguments) {
    const MacroReduceArguments& a = *arguments;
    const Status status =
        for_each_sequence<2>(a.sequences, a.ids, [&a](std::int64_t row, const Actions& actions, float** space) {
            const float* x = actions.values(a.sequences, a.x, row, space[0]);
            weighted_sums(a.weights, a.discount, x, actions, space[1]);
            float* result = a.result + row * a.num_macros;
            std::fill_n(result, a.num_macros, 0.0f);
            for (std::int32_t macro = 0; macro < actions.macros(); ++macro)
                if (actions.id(macro) < a.num_macros) result[actions.id(macro)] = space[1][macro];
        });
    if (status != OK) return status;
    return OK;
}

struct MacroReduceBackwardArguments {
    Sequences sequences;
    Tensor ids, grad;  // grad [rows, num_macros]
    Weights weights;
    double discount;
    std::int64_t num_macros;
    void* result;
    std::int64_t type;  // of the result
};

MARLHF_FUNCTION(macro_reduce_backward)(const MacroReduceBackwardArguments* arguments) {
    const MacroReduceBackwardArguments& a = *arguments;
    const Status status = for_each_sequence<1>(a.sequences, a.ids, [&a](std::int64_t row, const Actions& actions, float** space) {
        for (std::int32_t macro = 0; macro < actions.macros(); ++macro) {
            const std::int64_t id = actions.id(macro);
            const double factor = id < a.num_macros ? element(a.grad, row * a.grad.stride + id) : 0.0f;
            weigh(a.weights, a.discount, factor, actions.length(macro), space[0] + actions.start(macro));
        }
        const std::int64_t begin = a.sequences.begin(row);
        switch (a.type) {
            case BFLOAT16: actions.place(space[0], static_cast<BFloat16*>(a.result) + begin); break;
            case FLOAT16: actions.place(space[0], static_cast<Float16*>(a.result) + begin); break;
            default: actions.place(space[0], static_cast<float*>(a.result) + begin);
        }
    });
    if (status != OK) return status;
    clear_tail(a.sequences, a.result, a.type == FLOAT32 ? 4 : 2);
    return OK;
}

struct MacroBroadcastArguments {
    Sequences sequences;
    Tensor ids, macro_x;  // macro_x [rows, num_macros], of any type
    std::int64_t num_macros;
    std::int64_t size;  // of one number, in bytes
    void* result;
};

namespace {

struct Complex128 {
    double real = 0, imaginary = 0;
};

template <typename Number, typename Id>
void broadcast(const MacroBroadcastArguments& a) {
    for (std::int64_t row = 0; row < a.sequences.rows; ++row) {
        const Id* ids = static_cast<const Id*>(a.ids.data) + a.sequences.begin_in(a.ids, row);
        const Number* source = static_cast<const Number*>(a.macro_x.data) + row * a.macro_x.stride;
        Number* target = static_cast<Number*>(a.result) + a.sequences.begin(row);
        const std::int64_t length = a.sequences.length(row);
        for (std::int64_t position = 0; position < length; ++position) {
            const std::int64_t id = ids[position];
            target[position] = is_action(id, position) && id < a.num_macros ? source[id] : Number();
        }
    }
}

template <typename Number>
void broadcast(const MacroBroadcastArguments& a) {
    if (a.ids.type == INT32)
        broadcast<Number, std::int32_t>(a);
    else
        broadcast<Number, std::int64_t>(a);
}

}  // namespace

MARLHF_FUNCTION(macro_broadcast)(const MacroBroadcastArguments* arguments) {
    const MacroBroadcastArguments& a = *arguments;
    if (const Status status = a.sequences.check()) return status;
    switch (a.size) {
        case 1: broadcast<std::uint8_t>(a); break;
        case 2: broadcast<std::uint16_t>(a); break;
        case 4: broadcast<std::uint32_t>(a); break;
        case 8: broadcast<std::uint64_t>(a); break;
        default: broadcast<Complex128>(a);
    }
    clear_tail(a.sequences, a.result, a.size);
    return OK;
}

}  // namespace marlhf::MARLHF_ISA
