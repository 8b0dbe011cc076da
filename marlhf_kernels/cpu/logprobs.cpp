// Log-probabilities and entropies of labels under rows of logits, and their gradient.
//
// In units of log 2, with c = log2(e) / temperature and a reference r at or near the row's largest logit, a logit is
// y = c (x - r). A row gives S = sum 2^y and E = sum y 2^y, so that its log-probability is y_label - log S and its
// entropy log S - E / S: no large number is added before the difference is taken, however large the logits are.

#include <cmath>
#include <cstring>

#include "api.h"
#include "memory.h"
#include "parallel.h"
#include "simd.h"

namespace marlhf::MARLHF_ISA {
namespace {

constexpr double LN2 = 0.6931471805599453;
constexpr double LOG2E = 1.4426950408889634;

// A row is cut into segments, the unit of work of a thread, and a segment into blocks, which stay in the first cache.
// Both cuts depend on nothing but the vocabulary, and so do the bits of the results.
constexpr std::int64_t SEGMENT = 16384;
constexpr std::int64_t BLOCK = 2048;
// The fewest logits that are worth a thread's waking up.
constexpr std::int64_t GRAIN = 65536;
// 2^y may grow to 2^HEADROOM before a block is done again with a new reference: the first one is that of a segment's
// first block, and larger logits come seldom.
constexpr float HEADROOM = 4.0f;

struct Rows {
    const void* logits;
    const std::int64_t* offsets;  // where each row starts, in elements; null: at row * stride
    std::int64_t stride;
    std::int64_t count;
    std::int64_t vocabulary;
    const void* labels;
    int label_type;
    const float* temperatures;  // one for each row, or null
    double temperature;
    double softcap;  // infinite: none

    std::int64_t segments() const { return (vocabulary + SEGMENT - 1) / SEGMENT; }
    std::int64_t label(std::int64_t row) const {
        return label_type == INT32 ? static_cast<const std::int32_t*>(labels)[row]
                                   : static_cast<const std::int64_t*>(labels)[row];
    }
    std::int64_t start(std::int64_t row) const { return offsets ? offsets[row] : row * stride; }
    double temperature_of(std::int64_t row) const { return temperatures ? temperatures[row] : temperature; }

    // body(row, first column, columns, number of the segment)
    template <typename Body>
    void for_segments(int threads, const Body& body) const {
        const std::int64_t per_row = segments();
        const std::int64_t grain = GRAIN / (vocabulary < SEGMENT ? vocabulary : SEGMENT);
        parallel_for(count * per_row, grain, threads, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t item = begin; item < end; ++item) {
                const std::int64_t row = item / per_row, column = item % per_row * SEGMENT;
                const std::int64_t rest = vocabulary - column;
                body(row, column, rest < SEGMENT ? rest : SEGMENT, item);
            }
        });
    }
};

// What turns a stored logit into the x of the formulas, and a gradient in x into one in the logit.
template <bool CAPPED>
struct Softcap {
    float cap;
    float inverse;

    explicit Softcap(double softcap) : cap(static_cast<float>(softcap)), inverse(static_cast<float>(1 / softcap)) {}

    Float apply(Float x) const { return CAPPED ? cap * tanh(x * inverse) : x; }
    // d x / d logit, from x.
    Float slope(Float x) const {
        const Float t = x * inverse;
        return 1.0f - t * t;
    }
};

// 0 where no logit is finite: every 2^y is then 0, or NaN for a NaN.
float reference_of(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

template <typename T, bool CAPPED>
float block_maximum(const T* logits, std::int64_t count, const Softcap<CAPPED>& softcap) {
    Float maximum = broadcast(-INFINITY);
    std::int64_t i = 0;
    for (; i + LANES <= count; i += LANES) maximum = max(maximum, softcap.apply(load(logits + i)));
    if (i < count) {
        const int rest = static_cast<int>(count - i);
        const Float x = softcap.apply(load_first(logits + i, rest));
        maximum = max(maximum, first_lanes(rest) ? x : broadcast(-INFINITY));
    }
    return largest(maximum);
}

struct Sums {
    float maximum;
    float sum;
    float weighted;
};

template <typename T, bool CAPPED, bool ENTROPY>
Sums block_sums(const T* logits, std::int64_t count, const Softcap<CAPPED>& softcap, float scale, float reference) {
    const Float c = broadcast(scale), r = broadcast(reference), floor = broadcast(EXP2_FLOOR);
    // Two sums of each kind: one would wait for itself, and four do not fit into 16 registers.
    Float maximum[2] = {broadcast(-INFINITY), broadcast(-INFINITY)}, total[2] = {}, weighted[2] = {};
    const auto add = [&](int u, Float x) __attribute__((always_inline)) {
        maximum[u] = max(maximum[u], x);
        const Float y = max(floor, (x - r) * c);
        const Float w = exp2_above_floor(y);
        total[u] += w;
        if (ENTROPY) weighted[u] = fma(w, y, weighted[u]);
    };
    std::int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        // Hardware prefetch stops at the end of a page.
        __builtin_prefetch(logits + i + 2048 / sizeof(T));
        const Pair pair = load_pair(logits + i);
        add(0, softcap.apply(pair.part[0]));
        add(1, softcap.apply(pair.part[1]));
    }
    for (; i + LANES <= count; i += LANES) add(0, softcap.apply(load(logits + i)));
    if (i < count) {
        const int rest = static_cast<int>(count - i);
        const Float x = softcap.apply(load_first(logits + i, rest));
        add(0, first_lanes(rest) ? x : broadcast(-INFINITY));
    }
    return {
        largest(max(maximum[0], maximum[1])),
        sum(total[0] + total[1]),
        ENTROPY ? sum(weighted[0] + weighted[1]) : 0.0f,
    };
}

// The sums of part of a row, relative to `reference`.
struct Partial {
    float maximum = -INFINITY;
    float reference = 0.0f;
    double sum = 0.0;
    double weighted = 0.0;

    void move_to(float new_reference, double scale) {
        const double up = (static_cast<double>(reference) - new_reference) * scale;
        if (sum != 0.0) {
            const double factor = std::exp2(up);
            weighted = factor * (weighted + sum * up);
            sum *= factor;
        }
        reference = new_reference;
    }
};

template <typename T, bool CAPPED, bool ENTROPY>
Partial segment_sums(const T* logits, std::int64_t count, const Softcap<CAPPED>& softcap, float scale) {
    Partial partial;
    partial.reference = reference_of(block_maximum(logits, count < BLOCK ? count : BLOCK, softcap));
    for (std::int64_t i = 0; i < count; i += BLOCK) {
        const std::int64_t size = count - i < BLOCK ? count - i : BLOCK;
        Sums sums = block_sums<T, CAPPED, ENTROPY>(logits + i, size, softcap, scale, partial.reference);
        if (sums.maximum > partial.maximum) partial.maximum = sums.maximum;
        if ((sums.maximum - partial.reference) * scale > HEADROOM) {
            partial.move_to(reference_of(sums.maximum), scale);
            sums = block_sums<T, CAPPED, ENTROPY>(logits + i, size, softcap, scale, partial.reference);
        }
        partial.sum += sums.sum;
        partial.weighted += sums.weighted;
    }
    return partial;
}

template <typename T, bool CAPPED, bool ENTROPY>
void forward(const Rows& rows, Partial* partials, float* logprobs, float* entropies, float* maxima, float* log_sums,
             int threads) {
    const Softcap<CAPPED> softcap(rows.softcap);
    const T* logits = static_cast<const T*>(rows.logits);
    rows.for_segments(threads, [&](std::int64_t row, std::int64_t column, std::int64_t count, std::int64_t item) {
        if (rows.label(row) < 0) return;
        const float scale = static_cast<float>(LOG2E / rows.temperature_of(row));
        partials[item] = segment_sums<T, CAPPED, ENTROPY>(logits + rows.start(row) + column, count, softcap, scale);
    });
    const std::int64_t per_row = rows.segments();
    parallel_for(rows.count, 1024, threads, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row) {
            const std::int64_t label = rows.label(row);
            if (label < 0) {
                logprobs[row] = maxima[row] = log_sums[row] = 0.0f;
                if (ENTROPY) entropies[row] = 0.0f;
                continue;
            }
            const double temperature = rows.temperature_of(row);
            const double scale = static_cast<float>(LOG2E / temperature);
            Partial* parts = partials + row * per_row;
            Partial total;
            for (std::int64_t s = 0; s < per_row; ++s)
                if (parts[s].maximum > total.maximum) total.maximum = parts[s].maximum;
            total.reference = reference_of(total.maximum);
            for (std::int64_t s = 0; s < per_row; ++s) {
                parts[s].move_to(total.reference, scale);
                total.sum += parts[s].sum;
                total.weighted += parts[s].weighted;
            }
            const double log2_sum = std::log2(total.sum);
            const float x = softcap.apply(broadcast(load_one(logits + rows.start(row) + label)))[0];
            logprobs[row] = static_cast<float>(LN2 * ((static_cast<double>(x) - total.reference) * scale - log2_sum));
            if (ENTROPY) entropies[row] = static_cast<float>(LN2 * (log2_sum - total.weighted / total.sum));
            // Backward takes log S above the maximum of x / temperature from these two, as that is rounded here.
            const double maximum = total.maximum / temperature;
            maxima[row] = static_cast<float>(maximum);
            log_sums[row] = static_cast<float>(LN2 * log2_sum + (maximum - maxima[row]));
        }
    });
}

// The gradient -p (g + h (log p + H)) of a row in its x, with p = factor 2^y, is 2^y (constant + linear y).
struct RowGradient {
    float scale;
    float reference;
    float constant;
    float linear;

    RowGradient(double temperature, float maximum, float log_sum, double g, double h, double entropy) {
        scale = static_cast<float>(LOG2E / temperature);
        const double x = static_cast<double>(maximum) * temperature;
        reference = reference_of(static_cast<float>(x));
        const double log2_p = (reference - x) * scale - log_sum * LOG2E;
        const double factor = std::exp2(log2_p) / temperature;
        constant = static_cast<float>(-factor * (g + h * (LN2 * log2_p + entropy)));
        linear = static_cast<float>(-factor * h * LN2);
    }

    template <bool ENTROPY>
    Float of(Float x) const {
        const Float y = max(broadcast(EXP2_FLOOR), (x - reference) * scale);
        const Float slope = ENTROPY ? fma(broadcast(linear), y, broadcast(constant)) : broadcast(constant);
        return exp2_above_floor(y) * slope;
    }
};

template <typename T, bool CAPPED, bool ENTROPY>
void gradient_of(const T* logits, T* out, std::int64_t count, const Softcap<CAPPED>& softcap, const RowGradient& row) {
    const auto gradient = [&](Float logit) __attribute__((always_inline)) {
        const Float x = softcap.apply(logit);
        const Float in_x = row.of<ENTROPY>(x);
        return CAPPED ? in_x * softcap.slope(x) : in_x;
    };
    std::int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        const Pair pair = load_pair(logits + i);
        store_pair(out + i, {gradient(pair.part[0]), gradient(pair.part[1])});
    }
    for (; i + LANES <= count; i += LANES) store(out + i, gradient(load(logits + i)));
    if (i < count) {
        const int rest = static_cast<int>(count - i);
        store_first(out + i, gradient(load_first(logits + i, rest)), rest);
    }
}

struct Saved {
    const float* grad_logprobs;
    const float* grad_entropies;
    const float* maxima;
    const float* log_sums;
    const float* entropies;

    RowGradient gradient(std::int64_t row, double temperature) const {
        return {temperature, maxima[row], log_sums[row], grad_logprob(row), grad_entropies ? grad_entropies[row] : 0.0,
                grad_entropies ? entropies[row] : 0.0};
    }
    double grad_logprob(std::int64_t row) const { return grad_logprobs ? grad_logprobs[row] : 0.0; }
};

// `out` may be the logits themselves: each is read before its place is written.
template <typename T, bool CAPPED, bool ENTROPY>
void backward(const Rows& rows, const Saved& saved, void* out, const std::int64_t* out_offsets, std::int64_t out_stride,
              int threads) {
    const Softcap<CAPPED> softcap(rows.softcap);
    rows.for_segments(threads, [&](std::int64_t row, std::int64_t column, std::int64_t count, std::int64_t) {
        const T* logits = static_cast<const T*>(rows.logits) + rows.start(row) + column;
        T* to = static_cast<T*>(out) + (out_offsets ? out_offsets[row] : row * out_stride) + column;
        const std::int64_t label = rows.label(row);
        if (label < 0) {
            std::memset(to, 0, count * sizeof(T));
            return;
        }
        const double temperature = rows.temperature_of(row);
        const RowGradient gradient = saved.gradient(row, temperature);
        const std::int64_t here = label - column;
        const bool labelled = here >= 0 && here < count;
        float at_label = 0.0f;
        if (labelled) {
            const Float x = softcap.apply(broadcast(load_one(logits + here)));
            const Float in_x = gradient.of<ENTROPY>(x) + static_cast<float>(saved.grad_logprob(row) / temperature);
            at_label = (CAPPED ? in_x * softcap.slope(x) : in_x)[0];
        }
        gradient_of<T, CAPPED, ENTROPY>(logits, to, count, softcap, gradient);
        if (labelled) store_one(to + here, at_label);
    });
}

template <typename T>
auto forward_of(bool capped, bool entropy) {
    if (capped) return entropy ? forward<T, true, true> : forward<T, true, false>;
    return entropy ? forward<T, false, true> : forward<T, false, false>;
}

template <typename T>
auto backward_of(bool capped, bool entropy) {
    if (capped) return entropy ? backward<T, true, true> : backward<T, true, false>;
    return entropy ? backward<T, false, true> : backward<T, false, false>;
}

}  // namespace

// Status 1: a label outside of the vocabulary; 2: a temperature that is not above 0. `partials` holds 3 doubles for each
// segment of each row; `entropies` may be null.
MARLHF_FUNCTION(token_logprobs)(int type, const void* logits, const std::int64_t* offsets, std::int64_t stride,
                                std::int64_t count, std::int64_t vocabulary, int label_type, const void* labels,
                                const float* temperatures, double temperature, double softcap, void* partials,
                                float* logprobs, float* entropies, float* maxima, float* log_sums, int threads) {
    const Rows rows{logits, offsets, stride, count, vocabulary, labels, label_type, temperatures, temperature, softcap};
    if (temperatures == nullptr && !(temperature > 0)) return 2;
    for (std::int64_t row = 0; row < count; ++row) {
        const std::int64_t label = rows.label(row);
        if (label >= vocabulary) return 1;
        if (label >= 0 && !(rows.temperature_of(row) > 0)) return 2;
    }
    const bool capped = std::isfinite(softcap), entropy = entropies != nullptr;
    const auto run = type == FLOAT32    ? forward_of<float>(capped, entropy)
                     : type == BFLOAT16 ? forward_of<BFloat16>(capped, entropy)
                                        : forward_of<Float16>(capped, entropy);
    run(rows, static_cast<Partial*>(partials), logprobs, entropies, maxima, log_sums, threads);
    return 0;
}

// `out` has the logits' type; a gradient that is null is 0.
MARLHF_FUNCTION(token_logprobs_backward)(int type, const void* logits, const std::int64_t* offsets,
                                         std::int64_t stride, std::int64_t count, std::int64_t vocabulary,
                                         int label_type, const void* labels, const float* temperatures,
                                         double temperature, double softcap, const float* grad_logprobs,
                                         const float* grad_entropies, const float* maxima, const float* log_sums,
                                         const float* entropies, void* out, const std::int64_t* out_offsets,
                                         std::int64_t out_stride, int threads) {
    const Rows rows{logits, offsets, stride, count, vocabulary, labels, label_type, temperatures, temperature, softcap};
    const bool capped = std::isfinite(softcap), entropy = grad_entropies != nullptr;
    const auto run = type == FLOAT32    ? backward_of<float>(capped, entropy)
                     : type == BFLOAT16 ? backward_of<BFloat16>(capped, entropy)
                                        : backward_of<Float16>(capped, entropy);
    if (out != logits && out_offsets == nullptr)
        use_huge_pages(out, count * out_stride * (type == FLOAT32 ? 4 : 2));
    run(rows, {grad_logprobs, grad_entropies, maxima, log_sums, entropies}, out, out_offsets, out_stride, threads);
    return 0;
}

}  // namespace marlhf::MARLHF_ISA
