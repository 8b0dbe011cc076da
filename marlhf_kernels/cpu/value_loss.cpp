// The clipped value loss over tokens or macro actions, with its gradient.

#include "units.h"

namespace marlhf::MARLHF_ISA {
namespace {

enum Level : std::int64_t { TOKEN, MACRO };

// Loss and statistics of n units, and d loss / d value of each.
void add_units(float clip, const float* values, const float* old_values, const float* returns, std::int32_t n,
               float weight, float* slopes, RowSums& sums) {
    const Float zero{};
    double loss_sum = 0;
    for (std::int32_t begin = 0; begin < n; begin += BLOCK) {
        Float losses{};
        Int num_clipped{};
        by_lanes(std::min(BLOCK, n - begin), [&](std::int32_t i, int lanes) MARLHF_INLINE_BODY {
            const Float value = load_lanes(values + begin + i, lanes), old = load_lanes(old_values + begin + i, lanes);
            const Float target = load_lanes(returns + begin + i, lanes);
            const Float error = value - target, held = clamp(value, old - clip, old + clip) - target;
            const Float unclipped = error * error, clipped = held * held;
            const Int is_clipped = clipped > unclipped;
            losses += is_clipped ? clipped : unclipped;
            store_lanes(slopes + begin + i, is_clipped ? zero : error * weight, lanes);
            num_clipped += is_clipped;
        });
        loss_sum += sum(losses);
        sums.clipped += number_of_true(num_clipped);
    }
    sums.loss = 0.5 * loss_sum * weight;
    sums.units = n;
}

}  // namespace

struct MacroValueLossArguments {
    Sequences sequences;
    Tensor ids, values, old_values, returns;
    double clip;  // none: infinity
    Level level;
    Weights weights;
    Normalizer normalizer;
    float* loss;
    float* clip_fraction;
    float* gradient;  // before the division by the count
    float* count;
};

MARLHF_FUNCTION(macro_value_loss)(const MacroValueLossArguments* arguments) {
    const MacroValueLossArguments& a = *arguments;
    const Buffer<RowSums> rows(a.sequences.rows);
    if (!rows) return NO_MEMORY;
    const float clip = static_cast<float>(a.clip);
    const Status status = for_each_sequence<8>(a.sequences, a.ids, [&](std::int64_t row, const Actions& actions, float** space) {
        RowSums& sums = rows[row] = RowSums();
        const std::int32_t count = actions.count(), macros = actions.macros();
        const std::int64_t begin = a.sequences.begin(row);
        const float* values = actions.values(a.sequences, a.values, row, space[0]);
        const float* old_values = actions.values(a.sequences, a.old_values, row, space[1]);
        const float* returns = actions.values(a.sequences, a.returns, row, space[2]);
        float* gradient = actions.results(a.gradient + begin, space[3]);
        if (a.level == TOKEN) {
            const float weight = static_cast<float>(a.normalizer.row_weight(count));
            add_units(clip, values, old_values, returns, count, weight, gradient, sums);
        } else {
            float *macro_values = space[4], *macro_old_values = space[5], *macro_returns = space[6];
            weighted_sums(a.weights, 1, values, actions, macro_values);
            weighted_sums(a.weights, 1, old_values, actions, macro_old_values);
            for (std::int32_t macro = 0; macro < macros; ++macro) macro_returns[macro] = returns[actions.start(macro)];
            float* slopes = space[7];
            const float weight = static_cast<float>(a.normalizer.row_weight(macros));
            add_units(clip, macro_values, macro_old_values, macro_returns, macros, weight, slopes, sums);
            for (std::int32_t macro = 0; macro < macros; ++macro)
                weigh(a.weights, 1, slopes[macro], actions.length(macro), gradient + actions.start(macro));
        }
        sums.tokens = count;
        sums.macros = macros;
        actions.place(gradient, a.gradient + begin);
    });
    if (status != OK) return status;
    clear_tail(a.sequences, a.gradient, sizeof(float));
    const Totals totals(rows, a.sequences.rows);
    const double count = totals.count(a.normalizer);
    *a.count = static_cast<float>(count);
    *a.loss = static_cast<float>(totals.loss / count);
    *a.clip_fraction = static_cast<float>(totals.per_unit(static_cast<double>(totals.clipped)));
    return OK;
}

namespace {

template <typename To>
void scale(const float* gradient, std::int64_t size, float factor, To* result) {
    std::int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(result + i, load(gradient + i) * factor);
    for (; i < size; ++i) store_one(result + i, gradient[i] * factor);
}

}  // namespace

MARLHF_FUNCTION(scale_gradient)(const float* gradient, std::int64_t size, float factor, void* result, int type) {
    switch (type) {
        case BFLOAT16: scale(gradient, size, factor, static_cast<BFloat16*>(result)); break;
        case FLOAT16: scale(gradient, size, factor, static_cast<Float16*>(result)); break;
        default: scale(gradient, size, factor, static_cast<float*>(result));
    }
    return OK;
}

}  // namespace marlhf::MARLHF_ISA
