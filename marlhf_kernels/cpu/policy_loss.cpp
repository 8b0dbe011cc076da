// The clipped policy loss over tokens or macro actions, with its gradient.

#include "exponential.h"
#include "units.h"

namespace marlhf::MARLHF_ISA {
namespace {

enum RatioLevel : std::int64_t { TOKEN, MACRO, MACRO_MEAN };

constexpr float MAX_LOG_RATIO = 60, LARGEST_RATIO = 1.1420074e26f, SMALLEST_RATIO = 8.7565108e-27f;

}  // namespace

struct Clips {
    double low, high, dual;  // no dual clip: infinity
};

namespace {

// The sum of e^x - 1 - x.
double sum_of_excess(const float* x, std::int32_t n) {
    double result = 0;
    for (std::int32_t begin = 0; begin < n; begin += BLOCK) {
        Float lane_sums{};
        by_lanes(std::min(BLOCK, n - begin), [&](std::int32_t i, int lanes) MARLHF_INLINE_BODY {
            lane_sums += exponential(load_lanes(x + begin + i, lanes)).excess;
        });
        result += sum(lane_sums);
    }
    return result;
}

// Loss and statistics of n units, and d loss / d log_ratio of each. `sums.kl` is the sum of e^x - 1 - x over them.
void add_units(const Clips& clips, const float* log_ratios, const float* advantages, std::int32_t n, float weight,
               float* slopes, RowSums& sums) {
    const Float low = broadcast(1 - static_cast<float>(clips.low)), high = broadcast(1 + static_cast<float>(clips.high));
    const float dual = static_cast<float>(clips.dual);
    const Float zero{};
    double loss_sum = 0;
    Float largest_ratio{};
    for (std::int32_t begin = 0; begin < n; begin += BLOCK) {
        Float losses{}, ratios{}, excess{};
        Int num_clipped{};
        by_lanes(std::min(BLOCK, n - begin), [&](std::int32_t i, int lanes) MARLHF_INLINE_BODY {
            const Float x = load_lanes(log_ratios + begin + i, lanes), a = load_lanes(advantages + begin + i, lanes);
            const Exponential e = exponential(x);
            Float ratio = x > MAX_LOG_RATIO ? broadcast(LARGEST_RATIO) : e.power;
            ratio = x < -MAX_LOG_RATIO ? broadcast(SMALLEST_RATIO) : ratio;
            const Float unclipped = -a * ratio, clipped = -a * clamp(ratio, low, high), bound = -a * dual;
            const Int is_clipped = clipped > unclipped;
            const Float worse = is_clipped ? clipped : unclipped;
            const Int is_bounded = (a < 0.0f) & (bound < worse);
            const Float loss = is_bounded ? bound : worse;
            const Int is_nothing = a == 0.0f;
            const Int is_flat = is_clipped | is_bounded | is_nothing | (absolute(x) > MAX_LOG_RATIO);
            losses += is_nothing ? zero : loss;
            store_lanes(slopes + begin + i, is_flat ? zero : unclipped * weight, lanes);
            excess += e.excess;
            num_clipped += is_clipped;
            const Float inside = lanes == LANES ? ratio : (first_lanes(lanes) ? ratio : zero);
            ratios += inside;
            largest_ratio = max(largest_ratio, inside);
        });
        loss_sum += sum(losses);
        sums.ratio += sum(ratios);
        sums.kl += sum(excess);
        sums.clipped += number_of_true(num_clipped);
    }
    sums.loss = loss_sum * weight;
    sums.largest_ratio = largest(largest_ratio);
    sums.units = n;
}

}  // namespace

struct MacroPolicyLossArguments {
    Sequences sequences;
    Tensor ids, logprobs, old_logprobs, advantages;
    Clips clips;
    RatioLevel level;
    Normalizer normalizer;
    float* loss;
    float* statistics;  // clip fraction, approximate KL, mean and largest ratio
    float* gradient;    // before the division by the count
    float* count;
};

MARLHF_FUNCTION(macro_policy_loss)(const MacroPolicyLossArguments* arguments) {
    const MacroPolicyLossArguments& a = *arguments;
    const Buffer<RowSums> rows(a.sequences.rows);
    if (!rows) return NO_MEMORY;
    const Status status = for_each_sequence<6>(a.sequences, a.ids, [&](std::int64_t row, const Actions& actions, float** space) {
        RowSums& sums = rows[row] = RowSums();
        const std::int32_t count = actions.count(), macros = actions.macros();
        const std::int64_t begin = a.sequences.begin(row);
        const float* logprobs = actions.values(a.sequences, a.logprobs, row, space[0]);
        const float* old_logprobs = actions.values(a.sequences, a.old_logprobs, row, space[1]);
        const float* advantages = actions.values(a.sequences, a.advantages, row, space[2]);
        float* gradient = actions.results(a.gradient + begin, space[3]);
        float* differences = space[4];
        for (std::int32_t i = 0; i < count; ++i) differences[i] = logprobs[i] - old_logprobs[i];
        if (a.level == TOKEN) {
            const float weight = static_cast<float>(a.normalizer.row_weight(count));
            add_units(a.clips, differences, advantages, count, weight, gradient, sums);
        } else {
            const double kl = sum_of_excess(differences, count);
            float *log_ratios = space[0], *first_advantages = space[1], *slopes = space[5];
            weighted_sums(a.level == MACRO_MEAN ? MEAN : SUM, 1, differences, actions, log_ratios);
            for (std::int32_t macro = 0; macro < macros; ++macro)
                first_advantages[macro] = advantages[actions.start(macro)];
            const float weight = static_cast<float>(a.normalizer.row_weight(macros));
            add_units(a.clips, log_ratios, first_advantages, macros, weight, slopes, sums);
            sums.kl = kl;
            if (a.level == MACRO_MEAN) divide_by_lengths(actions, slopes);
            spread<1>({slopes}, actions, {gradient});
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
    a.statistics[0] = static_cast<float>(totals.per_unit(static_cast<double>(totals.clipped)));
    a.statistics[1] = static_cast<float>(totals.tokens ? totals.kl / static_cast<double>(totals.tokens) : 0);
    a.statistics[2] = totals.units ? static_cast<float>(totals.per_unit(totals.ratio)) : 1;
    // A NaN is in the sum, but not always in the maximum.
    a.statistics[3] = !totals.units ? 1 : totals.ratio == totals.ratio ? totals.largest_ratio : a.statistics[2];
    return OK;
}

struct PolicyPenaltyArguments {
    Sequences sequences;
    Tensor ids, logprobs, entropy, ref_logprobs;  // entropy and ref_logprobs: data may be null
    double entropy_coef, kl_loss_coef;
    Normalizer normalizer;
    float* loss;
    float* grad_logprobs;
    float* grad_entropy;  // null without entropy
    float* count;
};

MARLHF_FUNCTION(policy_penalty)(const PolicyPenaltyArguments* arguments) {
    const PolicyPenaltyArguments& a = *arguments;
    const Buffer<RowSums> rows(a.sequences.rows);
    if (!rows) return NO_MEMORY;
    const float kl_coef = static_cast<float>(a.kl_loss_coef), entropy_coef = static_cast<float>(a.entropy_coef);
    const Status status = for_each_sequence<4>(a.sequences, a.ids, [&](std::int64_t row, const Actions& actions, float** space) {
        RowSums& sums = rows[row] = RowSums();
        const std::int32_t count = sums.tokens = actions.count();
        const std::int64_t begin = a.sequences.begin(row);
        float* slopes = actions.results(a.grad_logprobs + begin, space[2]);
        if (a.ref_logprobs.data) {
            const float* logprobs = actions.values(a.sequences, a.logprobs, row, space[0]);
            const float* ref_logprobs = actions.values(a.sequences, a.ref_logprobs, row, space[1]);
            float* terms = space[3];
            for (std::int32_t i = 0; i < count; ++i) {
                const float difference = logprobs[i] - ref_logprobs[i];
                slopes[i] = difference * kl_coef;
                terms[i] = difference * slopes[i];
            }
            sums.loss += total(terms, count) / 2;
        } else {
            std::fill_n(slopes, count, 0.0f);
        }
        actions.place(slopes, a.grad_logprobs + begin);
        if (!a.entropy.data) return;
        const float* entropy = actions.values(a.sequences, a.entropy, row, space[0]);
        slopes = actions.results(a.grad_entropy + begin, space[2]);
        std::fill_n(slopes, count, -entropy_coef);
        sums.loss -= entropy_coef * total(entropy, count);
        actions.place(slopes, a.grad_entropy + begin);
    });
    if (status != OK) return status;
    clear_tail(a.sequences, a.grad_logprobs, sizeof(float));
    if (a.entropy.data) clear_tail(a.sequences, a.grad_entropy, sizeof(float));
    const Totals totals(rows, a.sequences.rows);
    const double count = totals.count(a.normalizer);
    *a.count = static_cast<float>(count);
    *a.loss = static_cast<float>(totals.loss / count);
    return OK;
}

struct ActionLabelsArguments {
    Sequences sequences;
    Tensor ids, labels;
    void* result;
};

namespace {

template <typename Label, typename Id>
void action_labels(const ActionLabelsArguments& a) {
    for (std::int64_t row = 0; row < a.sequences.rows; ++row) {
        const Id* ids = static_cast<const Id*>(a.ids.data) + a.sequences.begin_in(a.ids, row);
        const Label* labels = static_cast<const Label*>(a.labels.data) + a.sequences.begin_in(a.labels, row);
        Label* result = static_cast<Label*>(a.result) + a.sequences.begin(row);
        const std::int64_t length = a.sequences.length(row);
        for (std::int64_t position = 0; position < length; ++position)
            result[position] = is_action(ids[position], position) ? labels[position] : Label(-1);
    }
    Label* result = static_cast<Label*>(a.result);
    std::fill(result + a.sequences.end(), result + a.sequences.num_tokens, Label(-1));
}

}  // namespace

MARLHF_FUNCTION(action_labels)(const ActionLabelsArguments* arguments) {
    const ActionLabelsArguments& a = *arguments;
    if (const Status status = a.sequences.check()) return status;
    const bool narrow_ids = a.ids.type == INT32;
    if (a.labels.type == INT32)
        narrow_ids ? action_labels<std::int32_t, std::int32_t>(a) : action_labels<std::int32_t, std::int64_t>(a);
    else
        narrow_ids ? action_labels<std::int64_t, std::int32_t>(a) : action_labels<std::int64_t, std::int64_t>(a);
    return OK;
}

}  // namespace marlhf::MARLHF_ISA
