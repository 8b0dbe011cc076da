// KL-penalised rewards and generalised advantage estimation over macro actions.

#include "exponential.h"
#include "rows.h"
#include "weights.h"

namespace marlhf::MARLHF_ISA {
namespace {

enum Estimator : std::int64_t { K1, K2, K3 };
enum DiscountPer : std::int64_t { MACRO, TOKEN };

}  // namespace

struct KlPenalty {
    Tensor scores, logprobs, ref_logprobs;
    double kl_coef, score_clip;  // no clip: infinity
    Estimator estimator;
};

struct Gae {
    Tensor values, bootstrap_values;  // no bootstrap: data is null
    double gamma, lam;
    Weights reward_weights, value_weights;
    DiscountPer discount_per;
};

namespace {

// -kl_coef kl of each action token of a sequence, plus its score on the last one.
void penalized_rewards(const KlPenalty& penalty, const Sequences& sequences, const Actions& actions, std::int64_t row,
                       float* const* space, float* rewards, float* kl) {
    const std::int32_t count = actions.count();
    if (count == 0) return;
    const float* logprobs = actions.values(sequences, penalty.logprobs, row, space[0]);
    const float* ref_logprobs = actions.values(sequences, penalty.ref_logprobs, row, space[1]);
    const float beta = static_cast<float>(penalty.kl_coef);
    switch (penalty.estimator) {
        case K1:
            for (std::int32_t i = 0; i < count; ++i) kl[i] = logprobs[i] - ref_logprobs[i];
            break;
        case K2:
            for (std::int32_t i = 0; i < count; ++i) {
                const float d = logprobs[i] - ref_logprobs[i];
                kl[i] = d * d * 0.5f;
            }
            break;
        case K3:
            by_lanes(count, [&](std::int32_t i, int lanes) MARLHF_INLINE_BODY {
                const Float d = load_lanes(logprobs + i, lanes) - load_lanes(ref_logprobs + i, lanes);
                store_lanes(kl + i, exponential(-d).excess, lanes);
            });
    }
    for (std::int32_t i = 0; i < count; ++i) rewards[i] = -(kl[i] * beta);
    const float score = element(penalty.scores, row * penalty.scores.stride);
    const float limit = static_cast<float>(penalty.score_clip);
    rewards[actions.last()] += score < -limit ? -limit : score > limit ? limit : score;
}

// gamma^n and (gamma lambda)^n for every length n that a macro action can have; n = 1 for all where the discount is per
// macro action.
class Discounts {
   public:
    Discounts(const Gae& gae, std::int64_t longest)
        : per_token_(gae.discount_per == TOKEN), gamma_(per_token_ ? longest + 1 : 2),
          decay_(per_token_ ? longest + 1 : 2) {
        if (!*this) return;
        gamma_[0] = decay_[0] = 1;
        for (std::int64_t n = 1; n <= (per_token_ ? longest : 1); ++n) {
            gamma_[n] = gamma_[n - 1] * gae.gamma;
            decay_[n] = decay_[n - 1] * (gae.gamma * gae.lam);
        }
    }

    explicit operator bool() const { return gamma_ && decay_; }

    double gamma(std::int32_t length) const { return gamma_[per_token_ ? length : 1]; }
    double decay(std::int32_t length) const { return decay_[per_token_ ? length : 1]; }

   private:
    bool per_token_;
    Buffer<double> gamma_, decay_;
};

// advantage = delta + decay * (the advantage after it)
struct Step {
    double delta, decay;

    // From the advantage after `next` to that before this one.
    Step after(const Step& next) const { return {delta + decay * next.delta, decay * next.decay}; }
};

// A_k = delta_k + g_k l_k A_{k+1}, delta_k = R_k + g_k V_{k+1} - V_k, from the last macro action to the first, and
// A_k + V_k.
void gae_of_row(const Gae& gae, const Discounts& discounts, const Sequences& sequences, const Actions& actions,
                std::int64_t row, float* const* space, const float* rewards, float* advantages, float* returns) {
    if (actions.count() == 0) return;
    const float* values = actions.values(sequences, gae.values, row, space[0]);
    float *macro_rewards = space[1], *macro_values = space[2];
    if (adds_up(gae.reward_weights) && gae.value_weights == MEAN) {
        sums<2>({rewards, values}, actions, {macro_rewards, macro_values});
        if (gae.reward_weights == MEAN) divide_by_lengths(actions, macro_rewards);
        divide_by_lengths(actions, macro_values);
    } else {
        weighted_sums(gae.reward_weights, gae.gamma, rewards, actions, macro_rewards);
        weighted_sums(gae.value_weights, 1, values, actions, macro_values);
    }
    const Tensor& bootstrap = gae.bootstrap_values;
    double next_value = bootstrap.data ? element(bootstrap, row * bootstrap.stride) : 0.0f;
    double advantage = 0;
    const std::int32_t macros = actions.macros();
    const auto solve = [&](std::int32_t macro) MARLHF_INLINE_BODY {
        const std::int32_t length = actions.length(macro);
        const double value = macro_values[macro];
        const Step step{macro_rewards[macro] + discounts.gamma(length) * next_value - value, discounts.decay(length)};
        next_value = value;
        return step;
    };
    const auto keep = [&](std::int32_t macro) MARLHF_INLINE_BODY {
        macro_rewards[macro] = static_cast<float>(advantage);
        macro_values[macro] = static_cast<float>(advantage + macro_values[macro]);
    };
    std::int32_t macro = macros;
    // Four at a time, so that each step does not wait for the one before it: A_k = d_k + c_k A_{k+1} of two steps is
    // again of that form.
    for (; macro >= 4; macro -= 4) {
        const Step last = solve(macro - 1), third = solve(macro - 2).after(last);
        const Step second = solve(macro - 3).after(third), first = solve(macro - 4).after(second);
        const double after = advantage;
        std::int32_t k = macro - 1;
        for (const Step& step : {last, third, second, first}) {
            advantage = step.delta + step.decay * after;
            keep(k--);
        }
    }
    for (; macro > 0; --macro) {
        const Step step = solve(macro - 1);
        advantage = step.delta + step.decay * advantage;
        keep(macro - 1);
    }
    spread<2>({macro_rewards, macro_values}, actions, {advantages, returns});
}

}  // namespace

struct KlPenalizedRewardsArguments {
    Sequences sequences;
    Tensor ids;
    KlPenalty penalty;
    float *rewards, *kl;
};

MARLHF_FUNCTION(kl_penalized_rewards)(const KlPenalizedRewardsArguments* arguments) {
    const KlPenalizedRewardsArguments& a = *arguments;
    const Status status = for_each_sequence<4>(a.sequences, a.ids, [&a](std::int64_t row, const Actions& actions, float** space) {
        const std::int64_t begin = a.sequences.begin(row);
        float* rewards = actions.results(a.rewards + begin, space[2]);
        float* kl = actions.results(a.kl + begin, space[3]);
        penalized_rewards(a.penalty, a.sequences, actions, row, space, rewards, kl);
        actions.place(rewards, a.rewards + begin);
        actions.place(kl, a.kl + begin);
    });
    if (status != OK) return status;
    for (float* result : {a.rewards, a.kl}) clear_tail(a.sequences, result, sizeof(float));
    return OK;
}

struct MacroGaeArguments {
    Sequences sequences;
    Tensor ids, rewards;
    Gae gae;
    float *advantages, *returns;
};

MARLHF_FUNCTION(macro_gae)(const MacroGaeArguments* arguments) {
    const MacroGaeArguments& a = *arguments;
    if (const Status status = a.sequences.check()) return status;
    const Discounts discounts(a.gae, a.sequences.longest());
    if (!discounts) return NO_MEMORY;
    const Status status = for_each_sequence<6>(a.sequences, a.ids, [&](std::int64_t row, const Actions& actions, float** space) {
        const std::int64_t begin = a.sequences.begin(row);
        const float* rewards = actions.values(a.sequences, a.rewards, row, space[0]);
        float* advantages = actions.results(a.advantages + begin, space[1]);
        float* returns = actions.results(a.returns + begin, space[2]);
        gae_of_row(a.gae, discounts, a.sequences, actions, row, space + 3, rewards, advantages, returns);
        actions.place(advantages, a.advantages + begin);
        actions.place(returns, a.returns + begin);
    });
    if (status != OK) return status;
    for (float* result : {a.advantages, a.returns}) clear_tail(a.sequences, result, sizeof(float));
    return OK;
}

struct RolloutAdvantagesArguments {
    Sequences sequences;
    Tensor ids;
    KlPenalty penalty;
    Gae gae;
    float *advantages, *returns, *rewards, *kl;
};

MARLHF_FUNCTION(rollout_advantages)(const RolloutAdvantagesArguments* arguments) {
    const RolloutAdvantagesArguments& a = *arguments;
    if (const Status status = a.sequences.check()) return status;
    const Discounts discounts(a.gae, a.sequences.longest());
    if (!discounts) return NO_MEMORY;
    const Status status = for_each_sequence<9>(a.sequences, a.ids, [&](std::int64_t row, const Actions& actions, float** space) {
        const std::int64_t begin = a.sequences.begin(row);
        float* rewards = actions.results(a.rewards + begin, space[2]);
        float* kl = actions.results(a.kl + begin, space[3]);
        float* advantages = actions.results(a.advantages + begin, space[4]);
        float* returns = actions.results(a.returns + begin, space[5]);
        penalized_rewards(a.penalty, a.sequences, actions, row, space, rewards, kl);
        gae_of_row(a.gae, discounts, a.sequences, actions, row, space + 6, rewards, advantages, returns);
        actions.place(advantages, a.advantages + begin);
        actions.place(returns, a.returns + begin);
        actions.place(rewards, a.rewards + begin);
        actions.place(kl, a.kl + begin);
    });
    if (status != OK) return status;
    for (float* result : {a.advantages, a.returns, a.rewards, a.kl})
        clear_tail(a.sequences, result, sizeof(float));
    return OK;
}

}  // namespace marlhf::MARLHF_ISA
