// Masked moments and whitening.

#include <cmath>

#include "rows.h"

namespace marlhf::MARLHF_ISA {
namespace {

constexpr std::int64_t PIECE = 16384;
constexpr double EPSILON = 1e-8;

// Calls `use` with `x` as a pointer to what it holds.
template <typename Use>
void with_type(int type, const void* x, const Use& use) {
    switch (type) {
        case BFLOAT16: use(static_cast<const BFloat16*>(x)); break;
        case FLOAT16: use(static_cast<const Float16*>(x)); break;
        default: use(static_cast<const float*>(x));
    }
}

// Number, mean, and sum of squared differences from the mean.
struct Moments {
    double count = 0, mean = 0, squares = 0;

    void add(const Moments& other) {
        if (other.count == 0) return;
        const double total = count + other.count, difference = other.mean - mean;
        mean += difference * (other.count / total);
        squares += other.squares + difference * difference * (count * other.count / total);
        count = total;
    }
};

template <typename Number>
Moments moments_of(const Number* x, const std::uint8_t* mask, std::int64_t size) {
    constexpr std::int64_t LANES = 8;
    double counts[LANES] = {}, sums[LANES] = {}, squares[LANES] = {};
    for (std::int64_t i = 0; i < size; ++i) {
        counts[i % LANES] += mask[i] != 0;
        sums[i % LANES] += mask[i] ? static_cast<double>(load_one(x + i)) : 0.0;
    }
    Moments moments;
    double sum = 0;
    for (std::int64_t lane = 0; lane < LANES; ++lane) {
        moments.count += counts[lane];
        sum += sums[lane];
    }
    if (moments.count == 0) return moments;
    moments.mean = sum / moments.count;
    for (std::int64_t i = 0; i < size; ++i) {
        const double difference = static_cast<double>(load_one(x + i)) - moments.mean;
        squares[i % LANES] += mask[i] ? difference * difference : 0.0;
    }
    for (double lane : squares) moments.squares += lane;
    return moments;
}

}  // namespace

// `result`: number, mean, sum of squared differences.
MARLHF_FUNCTION(masked_moments)(int type, const void* x, const std::uint8_t* mask, std::int64_t size, int threads,
                                float* result) {
    const std::int64_t pieces = (size + PIECE - 1) / PIECE;
    const Buffer<Moments> partial(pieces);
    if (!partial) return NO_MEMORY;
    parallel_for(size, PIECE, threads, [&](std::int64_t begin, std::int64_t end) {
        with_type(type, x, [&](const auto* numbers) {
            partial[begin / PIECE] = moments_of(numbers + begin, mask + begin, end - begin);
        });
    });
    Moments all;
    for (std::int64_t piece = 0; piece < pieces; ++piece) all.add(partial[piece]);
    result[0] = static_cast<float>(all.count);
    result[1] = static_cast<float>(all.mean);
    result[2] = static_cast<float>(all.squares);
    return OK;
}

// `moments` as masked_moments gives them.
MARLHF_FUNCTION(masked_normalize)(int type, const void* x, const std::uint8_t* mask, std::int64_t size, int threads,
                                  const float* moments, int shift_mean, int unbiased, float* result) {
    const double degrees = static_cast<double>(moments[0]) - (unbiased ? 1 : 0);
    const double variance = moments[2] / (degrees < 1 ? 1 : degrees);
    const float mean = moments[1], scale = static_cast<float>(1 / std::sqrt(variance + EPSILON));
    const float shift = shift_mean ? 0.0f : mean;
    parallel_for(size, PIECE, threads, [&](std::int64_t begin, std::int64_t end) {
        with_type(type, x, [&](const auto* numbers) {
            for (std::int64_t i = begin; i < end; ++i)
                result[i] = mask[i] ? (load_one(numbers + i) - mean) * scale + shift : 0.0f;
        });
    });
    return OK;
}

}  // namespace marlhf::MARLHF_ISA
