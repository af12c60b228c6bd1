// Passes over packed tokens that the statistics, gates and weights of a batch are made of; see passes.py.
//
// A vector of doubles at a time, in an order that a segment's tokens fix; a segment belongs to one thread. Sums over
// segments are digits at fixed places. So neither the number of threads nor how a batch is split changes a bit.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 8;
#elif defined(__AVX__)
constexpr int LANES = 4;
#else
constexpr int LANES = 2;
#endif
typedef double V __attribute__((vector_size(8 * LANES)));  // of the processor's width: compilers split wider ones badly
typedef int64_t I __attribute__((vector_size(8 * LANES)));
constexpr int64_t BLOCK = 4096;
constexpr double LIMIT = 20.0;  // numerics.LOG_RATIO_LIMIT
constexpr double INF = INFINITY;

inline V all(double x) { return V{} + x; }
inline V least(V a, V b) { return b < a ? b : a; }     // NaN in a stays
inline V largest(V a, V b) { return b > a ? b : a; }
inline V clamped(V x) { return largest(least(x, all(LIMIT)), all(-LIMIT)); }
inline double clamped(double x) { return x > LIMIT ? LIMIT : x < -LIMIT ? -LIMIT : x; }
inline V magnitude(V x) { return (V)((I)x & INT64_MAX); }

template <class T> inline V load(const T* x) {
    typedef T W __attribute__((vector_size(LANES * sizeof(T))));
    W w;
    std::memcpy(&w, x, sizeof w);
    return __builtin_convertvector(w, V);
}

// Numbers of the tokens' dtype, rounded to it.
template <class T> inline void store(V x, T* out) {
    typedef T W __attribute__((vector_size(LANES * sizeof(T))));
    W w = __builtin_convertvector(x, W);
    std::memcpy(out, &w, sizeof w);
}

// A difference as the tokens' dtype rounds it, which is written too.
template <class T> inline V difference(const T* a, const T* b, T* out) {
    typedef T W __attribute__((vector_size(LANES * sizeof(T))));
    W x, y;
    std::memcpy(&x, a, sizeof x), std::memcpy(&y, b, sizeof y);
    x -= y;
    std::memcpy(out, &x, sizeof x);
    return __builtin_convertvector(x, V);
}

// The last tokens, filled up with a number that adds nothing.
template <class T> inline V load_some(const T* x, int64_t n, T filler) {
    T some[LANES];
    for (int i = 0; i < LANES; i++) some[i] = i < n ? x[i] : filler;
    return load(some);
}

inline double added(V x) {
    double some[LANES];
    std::memcpy(some, &x, sizeof some);
    for (int n = LANES / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) some[i] += some[i + n];
    return some[0];
}
inline double greatest(V x) {
    double m = x[0];
    for (int i = 1; i < LANES; i++) m = x[i] > m ? x[i] : m;
    return m;
}

// e^x - 1 for |x| <= 700. x = k log 2 + r, |r| <= .3466; a series of e^r - 1 whose first missing term is below
// 2e-10 of it for float32 tokens, 2e-17 for float64.
template <class T> inline void exponential(V x, V& scale, V& rest) {
    const V magic = all(6755399441055744.0);  // 1.5 * 2^52: adding it rounds to an integer, in the low bits
    V shifted = x * 1.4426950408889634 + magic;
    V k = shifted - magic;
    V r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;
    V s;
    if (sizeof(T) == 4) {
        s = all(1.0 / 40320);
    } else {
        s = all(1.0 / 6227020800);
        s = s * r + 1.0 / 479001600;
        s = s * r + 1.0 / 39916800;
        s = s * r + 1.0 / 3628800;
        s = s * r + 1.0 / 362880;
        s = s * r + 1.0 / 40320;
    }
    s = s * r + 1.0 / 5040;
    s = s * r + 1.0 / 720;
    s = s * r + 1.0 / 120;
    s = s * r + 1.0 / 24;
    s = s * r + 1.0 / 6;
    s = s * r + 0.5;
    rest = s * r * r + r;
    scale = (V)(((I)shifted << 52) + (I)all(1.0));
}
template <class T> inline V expm1(V x) {
    V scale, rest;
    exponential<T>(x, scale, rest);
    return scale * rest + (scale - 1.0);
}
// e^x; 1e-304 from -700 on, where float64 ends.
template <class T> inline V exp(V x) {
    V scale, rest;
    exponential<T>(largest(x, all(-700.0)), scale, rest);
    return scale * rest + scale;
}

// Calls f(begin, end) for shares of 0 .. n, on so many threads.
template <class F> void shared(int64_t n, int64_t threads, F f) {
    threads = std::min(threads, n);
    if (threads <= 1) return f(int64_t(0), n);
    std::vector<std::thread> running;
    for (int64_t i = 1; i < threads; i++) running.emplace_back(f, n * i / threads, n * (i + 1) / threads);
    f(int64_t(0), n / threads);
    for (auto& t : running) t.join();
}

// Whether such cuts make segments of n tokens.
inline bool proper(const int64_t* cuts, int64_t segments, int64_t n) {
    return segments >= 0 && cuts[0] >= 0 && cuts[segments] <= n && std::is_sorted(cuts, cuts + segments + 1);
}

// Calls f(segment) for each, on so many threads, which have about as many tokens each.
template <class F> void shared_segments(const int64_t* cuts, int64_t segments, int64_t threads, F f) {
    int64_t start = cuts[0], tokens = cuts[segments] - start;
    shared(tokens, threads, [&](int64_t begin, int64_t end) {
        const int64_t* from = std::lower_bound(cuts, cuts + segments, start + begin);
        const int64_t* to = end == tokens ? cuts + segments : std::lower_bound(cuts, cuts + segments, start + end);
        for (; from < to; from++) f(int64_t(from - cuts));
    });
}

// Columns of a row: what is known of the log-ratios l of some tokens. The order of passes.COLUMNS.
enum {
    L, L_LIMITED, L2, ABS, K3, EXCESS_ABS, W, W2, P, P2, D, D2, PD, D_ABS,  // drift.TOKEN_SUMS
    ABS_LIMITED, FIRST, L_MAX, L_MIN, D_MAX, TOP, SCALED, SCALED2, ROW  // sums of e^(l - TOP) and of its square
};

inline double bigger(double a, double b) { return a != a || a > b ? a : b; }  // NaN wins

inline void no_tokens(double* row) {
    for (int i = 0; i < ROW; i++) row[i] = L_MAX <= i && i <= D_MAX ? -INF : 0.0;
}

// Row a becomes that of both.
inline void join(double* a, const double* b) {
    for (int i = 0; i < L_MAX; i++) a[i] += b[i];
    for (int i = L_MAX; i <= D_MAX; i++) a[i] = bigger(a[i], b[i]);
    double top = a[SCALED] == 0 ? b[TOP] : b[SCALED] == 0 ? a[TOP] : bigger(a[TOP], b[TOP]), sums[2] = {};
    for (const double* x : {(const double*)a, b})
        if (x[SCALED] != 0) {
            double e = x[TOP] == top ? 1.0 : std::exp(x[TOP] - top);
            sums[0] += x[SCALED] * e, sums[1] += x[SCALED2] * e * e;
        }
    a[TOP] = top, a[SCALED] = sums[0], a[SCALED2] = sums[1];
}

// Tokens with a log-ratio beyond the limit, or NaN: one by one, as the definitions are.
template <class T> void careful_row(const T* first, const T* ratio, int64_t n, T* weight, double* row) {
    no_tokens(row);
    for (int64_t t = 0; t < n; t++) {
        double f = first[t], l = ratio[t], limited = clamped(l), excess = std::expm1(limited), p = std::exp(f);
        double d = l <= LIMIT ? p * excess : std::exp(f + l) - p;
        weight[t] = T(1 + excess);
        row[L] += l, row[L_LIMITED] += limited, row[L2] += limited * limited, row[ABS] += std::fabs(l);
        row[K3] += excess - limited, row[EXCESS_ABS] += std::fabs(excess);
        row[W] += 1 + excess, row[W2] += (1 + excess) * (1 + excess);
        row[P] += p, row[P2] += p * p, row[D] += d, row[D2] += d * d, row[PD] += p * d, row[D_ABS] += std::fabs(d);
        row[ABS_LIMITED] += std::fabs(limited), row[FIRST] += f;
        row[L_MAX] = bigger(l, row[L_MAX]), row[L_MIN] = bigger(-l, row[L_MIN]);
        row[D_MAX] = bigger(std::fabs(d), row[D_MAX]);
    }
    row[TOP] = std::max(row[L_MAX], -1.7976931348623157e308);  // of -inf alone: no -inf - -inf below
    for (int64_t t = 0; t < n; t++) {
        double e = std::exp(double(ratio[t]) - row[TOP]);
        row[SCALED] += e, row[SCALED2] += e * e;
    }
}

// Log-ratios l = second - first and weights e^l of n tokens, and their row.
template <class T>
void row_of(const T* first, const T* second, int64_t n, T* ratio, T* weight, double* row) {
    V l_sum{}, l2{}, abs{}, k3{}, excess_abs{}, more{}, more2{}, p_sum{}, p2{}, d_sum{}, d2{}, pd{}, d_abs{}, f_sum{};
    V high = all(-INF), low = all(INF), d_max{};
    auto step = [&](V f, V l) {
        V excess = expm1<T>(l), p = exp<T>(f), d = p * excess, size = magnitude(d);
        l_sum += l, l2 += l * l, abs += magnitude(l), k3 += excess - l, excess_abs += magnitude(excess);
        more += excess, more2 += excess * excess, p_sum += p, p2 += p * p;
        d_sum += d, d2 += d * d, pd += p * d, d_abs += size;
        d_max = largest(d_max, size);
        return excess + 1.0;
    };
    int64_t t = 0;
    for (; t + LANES <= n; t += LANES) {
        V f = load(first + t), l = difference(second + t, first + t, ratio + t);
        high = largest(high, l), low = least(low, l), f_sum += f;
        store(step(f, l), weight + t);
    }
    if (t < n) {
        T w[LANES];
        for (int64_t i = t; i < n; i++) ratio[i] = second[i] - first[i];
        V l = load_some(ratio + t, n - t, ratio[t]);
        high = largest(high, l), low = least(low, l), f_sum += load_some(first + t, n - t, T(0));
        store(step(load_some(first + t, n - t, T(-INF)), load_some(ratio + t, n - t, T(0))), w);
        std::copy(w, w + (n - t), weight + t);
    }
    double top = greatest(high), bottom = -greatest(-low), sum = added(l_sum);
    if (!(top <= LIMIT && bottom >= -LIMIT && sum == sum)) return careful_row(first, ratio, n, weight, row);
    double e = added(more), e2 = added(more2);
    row[L] = row[L_LIMITED] = sum, row[L2] = added(l2), row[ABS] = row[ABS_LIMITED] = added(abs);
    row[K3] = added(k3), row[EXCESS_ABS] = added(excess_abs);
    row[W] = row[SCALED] = n + e, row[W2] = row[SCALED2] = n + 2 * e + e2, row[TOP] = 0;
    row[P] = added(p_sum), row[P2] = added(p2), row[D] = added(d_sum), row[D2] = added(d2), row[PD] = added(pd);
    row[D_ABS] = added(d_abs), row[FIRST] = added(f_sum);
    row[L_MAX] = top, row[L_MIN] = -bottom, row[D_MAX] = greatest(d_max);
}

// A sum that no order changes: the largest place and the digits from there on, as stats/digits.py has them.
struct Digits {
    static constexpr int WIDTH = 26, PLACES = 4, NUMBERS = 1 + PLACES;
    double place = -1e15, digit[PLACES] = {};

    // Adds x 2^(WIDTH above).
    void add(double x, int64_t above = 0) {
        int64_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        int64_t exponent = ((bits >> 52) & 0x7ff) - 1023;
        if (exponent < -900) return;  // next to nothing
        if (exponent == 1024) return raise(1e15), void(digit[0] += x);  // infinite, or no number
        int64_t down = (exponent + 40 * WIDTH) / WIDTH - 40;
        raise(down + above);
        bits = (1023 - WIDTH * down) << 52;
        double unit;
        std::memcpy(&unit, &bits, sizeof unit);
        x *= unit;  // 1 <= |x| < 2^WIDTH
        for (double i = place - (down + above); i < PLACES && x != 0; i++) {
            double whole = std::trunc(x);
            digit[int(i)] += whole, x = (x - whole) * (1 << WIDTH);
        }
    }
    // Adds x e^l.
    void add_scaled(double x, double l) {
        constexpr double STEP = WIDTH * 0.6931471805599453;
        if (x == 0 || l == -INF) return;
        if (!(std::fabs(l) < 1e15)) return add(NAN);
        double above = std::floor(l / STEP);
        add(x * std::exp(l - above * STEP), int64_t(above));
    }

  private:
    void raise(double to) {
        if (to <= place) return;
        for (int i = PLACES - 1; i >= 0; i--) digit[i] = i >= to - place ? digit[i - int(to - place)] : 0.0;
        place = to;
    }
};

template <class T> void digits(const T* x, int64_t n, double* out) {
    Digits sum;
    for (int64_t i = 0; i < n; i++) sum.add(x[i]);
    std::memcpy(out, &sum, sizeof sum);
}

// Of e^x and of its square.
template <class T> void digits_of_exp(const T* x, int64_t n, double* out) {
    Digits sums[2];
    for (int64_t i = 0; i < n; i++) sums[0].add_scaled(1.0, x[i]), sums[1].add_scaled(1.0, 2.0 * x[i]);
    std::memcpy(out, sums, sizeof sums);
}

// Sums that stats/drift.py keeps of a ratio: drift.TOKEN_SUMS; of sequences with m = mean l: m, |m| and e^-m, negative
// log-likelihood and perplexity under the first policy and under the second; sums whose logs are kept: e^l and its
// square over tokens, and e^(sum l) and its square over sequences. Then maxima: drift.TOKEN_MAXIMA, m and -m.
constexpr int SUMS = L_MAX - 2 + 7 + 4, MAXIMA = 5;

void of_rows(const double* table, const int64_t* cuts, int64_t segments, double* out) {
    Digits sums[SUMS];
    double maxima[MAXIMA];
    std::fill(maxima, maxima + MAXIMA, -INF);
    for (int64_t s = 0; s < segments; s++) {
        const double* row = table + s * ROW;
        int64_t n = cuts[s + 1] - cuts[s];
        if (n == 0) continue;
        Digits* next = sums;
        for (int i = 0; i <= D_ABS; i++) next++->add(row[i]);
        double m = row[L] / n, nll = -row[FIRST] / n;
        for (double x : {m, std::fabs(m), std::exp(clamped(-m))}) next++->add(x);
        for (double x : {nll, nll - m}) next++->add(x), next++->add(std::exp(std::min(x, LIMIT)));
        if (row[TOP] == 0)
            next++->add(row[SCALED]), next++->add(row[SCALED2]);
        else
            next++->add_scaled(row[SCALED], row[TOP]), next++->add_scaled(row[SCALED2], 2 * row[TOP]);
        next++->add_scaled(1.0, row[L]), next++->add_scaled(1.0, 2 * row[L]);
        const double here[] = {row[L_MAX], row[L_MIN], row[D_MAX], m, -m};
        for (int i = 0; i < MAXIMA; i++) maxima[i] = bigger(here[i], maxima[i]);
    }
    std::memcpy(out, sums, sizeof sums);
    std::memcpy(out + SUMS * Digits::NUMBERS, maxima, sizeof maxima);
}

// One ratio of a batch; `table` gets a row for each segment, `out` what `of_rows` gives.
template <class T>
int sweep(
    const T* first, const T* second, int64_t n, const int64_t* cuts, int64_t segments, int64_t threads, T* ratio,
    T* weight, double* table, double* out) {
    if (!proper(cuts, segments, n) || cuts[0] != 0 || cuts[segments] != n) return 0;
    shared_segments(cuts, segments, threads, [&](int64_t s) {
        double *row = table + s * ROW, next[ROW];
        no_tokens(row);
        for (int64_t t = cuts[s]; t < cuts[s + 1]; t += BLOCK) {
            row_of(first + t, second + t, std::min(BLOCK, cuts[s + 1] - t), ratio + t, weight + t, next);
            join(row, next);
        }
    });
    of_rows(table, cuts, segments, out);
    return 1;
}

// Sum over tokens of e^(log rho) |e^l - 1| / 2, both within +-LIMIT.
template <class T>
int reweighted_tv(
    const T* log_rho, const T* l, int64_t n, const int64_t* cuts, int64_t segments, int64_t threads, double* table,
    double* out) {
    if (!proper(cuts, segments, n)) return 0;
    auto half = [](V rho, V x) { return (expm1<T>(clamped(rho)) + 1.0) * magnitude(expm1<T>(clamped(x))) * 0.5; };
    shared_segments(cuts, segments, threads, [&](int64_t s) {
        V sum{};
        int64_t t = cuts[s], stop = cuts[s + 1];
        for (; t + LANES <= stop; t += LANES) sum += half(load(log_rho + t), load(l + t));
        if (t < stop) sum += half(load_some(log_rho + t, stop - t, T(0)), load_some(l + t, stop - t, T(0)));
        table[s] = added(sum);
    });
    digits(table, segments, out);
    return 1;
}

// Statistics of a log-ratio, in the order of passes.Statistic.
struct Itself { template <class T> static V of(V l) { return l; } };
struct Clamped { template <class T> static V of(V l) { return clamped(l); } };
struct HalfSquare { template <class T> static V of(V l) { l = clamped(l); return l * l * 0.5; } };
struct Bregman { template <class T> static V of(V l) { l = clamped(l); return expm1<T>(l) - l; } };
struct Magnitude { template <class T> static V of(V l) { return magnitude(clamped(l)); } };
struct RatioError { template <class T> static V of(V l) { return magnitude(expm1<T>(clamped(l))); } };

// Whether the segments are parts of n tokens; nothing is read or written if they are not.
template <class T>
int segment_sums(const T* x, int64_t n, const int64_t* cuts, int64_t segments, int64_t threads, double* out) {
    if (!proper(cuts, segments, n)) return 0;
    shared_segments(cuts, segments, threads, [&](int64_t s) {
        V a{}, b{};
        int64_t t = cuts[s], stop = cuts[s + 1];
        for (; t + 2 * LANES <= stop; t += 2 * LANES) a += load(x + t), b += load(x + t + LANES);
        for (; t < stop; t += LANES) a += load_some(x + t, stop - t, T(0));
        out[s] = added(a + b);
    });
    return 1;
}

template <class T> inline void within(const T* __restrict y, int64_t n, T low, T high, uint8_t* __restrict marks) {
    for (int64_t i = 0; i < n; i++) marks[i] = (y[i] >= low) & (y[i] <= high);
}

// Marks the tokens whose statistic, in the tokens' own dtype, lies within [bounds[0], bounds[1]]; NaN does not.
template <class F, class T> void inside(const T* x, int64_t n, int64_t threads, const double* bounds, uint8_t* marks) {
    const T low = T(bounds[0]), high = T(bounds[1]);
    constexpr int64_t SOME = 512;  // numbers that wait in the cache for a loop that compares them
    shared((n + SOME - 1) / SOME, threads, [=](int64_t begin, int64_t end) {
        T y[SOME];
        for (int64_t t = begin * SOME; t < std::min(n, end * SOME); t += SOME) {
            const int64_t some = std::min(SOME, n - t);
            int64_t i = 0;
            for (; i + LANES <= some; i += LANES) store(F::template of<T>(load(x + t + i)), y + i);
            if (i < some) store(F::template of<T>(load_some(x + t + i, some - i, T(0))), y + i);
            within(y, some, low, high, marks + t);
        }
    });
}

template <class T>
void inside_of(int64_t what, const T* x, int64_t n, int64_t threads, const double* bounds, uint8_t* marks) {
    void (*const passes[])(const T*, int64_t, int64_t, const double*, uint8_t*) = {
        inside<Itself, T>, inside<Clamped, T>, inside<HalfSquare, T>,
        inside<Bregman, T>, inside<Magnitude, T>, inside<RatioError, T>};
    passes[what](x, n, threads, bounds, marks);
}

// Weights e^x, x within +-LIMIT, in the tokens' dtype.
template <class T> void exponentials(const T* x, int64_t n, int64_t threads, T* weight) {
    shared((n + BLOCK - 1) / BLOCK, threads, [&](int64_t begin, int64_t end) {
        int64_t t = begin * BLOCK, stop = std::min(n, end * BLOCK);
        for (; t + LANES <= stop; t += LANES) store(expm1<T>(clamped(load(x + t))) + 1.0, weight + t);
        if (t == stop) return;
        T w[LANES];
        store(expm1<T>(clamped(load_some(x + t, stop - t, T(0)))) + 1.0, w);
        std::copy(w, w + (stop - t), weight + t);
    });
}

// A weight whose log x is beyond a limit becomes `above` or `below` and is marked; compared in the tokens' own dtype.
template <class T>
void limited_weights(
    const T* x, const T* weight, int64_t n, int64_t threads, const double* limits, T* out, uint8_t* limited) {
    const T log_cap = T(limits[0]), log_floor = T(limits[1]), above = T(limits[2]), below = T(limits[3]);
    const T most = T(LIMIT);
    shared((n + BLOCK - 1) / BLOCK, threads, [=](int64_t begin, int64_t end) {
        const int64_t stop = std::min(n, end * BLOCK);
        for (int64_t t = begin * BLOCK; t < stop; t++) {
            T l = x[t] > most ? most : x[t] < -most ? -most : x[t], w = weight[t];
            w = l > log_cap ? above : w;
            out[t] = l < log_floor ? below : w;
            limited[t] = (l > log_cap) | (l < log_floor);
        }
    });
}

// Sums of w, w^2 and of w other than 1, maxima of w and of -w; a row of them for each segment in `table`.
template <class T>
int weight_sums(
    const T* weight, int64_t n, const int64_t* cuts, int64_t segments, int64_t threads, double* table, double* out) {
    if (!proper(cuts, segments, n)) return 0;
    shared_segments(cuts, segments, threads, [&](int64_t s) {
        V w1{}, w2{}, high = all(-INF), low = all(INF);
        I changed{};
        int64_t t = cuts[s], stop = cuts[s + 1];
        for (; t + LANES <= stop; t += LANES) {
            V w = load(weight + t);
            w1 += w, w2 += w * w, changed -= w != 1.0;
            high = largest(high, w), low = least(low, w);
        }
        double* row = table + s * 5;
        row[0] = added(w1), row[1] = added(w2), row[2] = added(__builtin_convertvector(changed, V));
        row[3] = greatest(high), row[4] = greatest(-low);
        for (; t < stop; t++) {
            double w = weight[t];
            row[0] += w, row[1] += w * w, row[2] += w != 1.0;
            row[3] = bigger(w, row[3]), row[4] = bigger(-w, row[4]);
        }
        if (row[0] != row[0]) row[3] = row[4] = row[0];
    });
    Digits sums[2];
    double* others = out + 2 * Digits::NUMBERS;
    others[0] = 0, others[1] = others[2] = -INF;
    for (const double* row = table; row < table + segments * 5; row += 5) {
        sums[0].add(row[0]), sums[1].add(row[1]), others[0] += row[2];
        for (int i = 1; i < 3; i++) others[i] = bigger(row[i + 2], others[i]);
    }
    std::memcpy(out, sums, sizeof sums);
    return 1;
}

// Counts, sums and sums of squares by bin of a histogram.Grid that begins at 2^low and has so many bins on either side.
template <class T>
void histogram(const T* x, int64_t n, int64_t low, int64_t side, int64_t* counts, double* moments) {
    constexpr int64_t ROWS = 65536;  // numerics.BLOCK: the sums are added up as the plain way adds them
    typedef double Q __attribute__((vector_size(32)));
    const int64_t bins = 2 * side + 1;
    const int32_t first = (low + 127) * 4 - 1, most = side;
    std::vector<double> sums(4 * bins);
    int32_t index[BLOCK];
    for (int64_t begin = 0; begin < n; begin += ROWS) {
        std::fill(sums.begin(), sums.end(), 0.0);
        for (int64_t t = begin; t < std::min(n, begin + ROWS); t += BLOCK) {
            const int64_t some = std::min(BLOCK, n - t);
            for (int64_t i = 0; i < some; i++) {
                float f = float(x[t + i]);
                int32_t bits;
                std::memcpy(&bits, &f, sizeof bits);
                int32_t out = ((bits & INT32_MAX) >> 21) - first;
                out = out < 0 ? 0 : out > most ? most : out;
                index[i] = most + (bits < 0 ? -out : out);
            }
            for (int64_t i = 0; i < some; i++) {
                double value = x[t + i], *bin = &sums[4 * index[i]];
                Q q;
                std::memcpy(&q, bin, sizeof q);
                q += Q{value, value * value, 1.0, 0.0};
                std::memcpy(bin, &q, sizeof q);
            }
        }
        for (int64_t i = 0; i < bins; i++) {
            moments[i] += sums[4 * i], moments[bins + i] += sums[4 * i + 1];
            counts[i] += int64_t(sums[4 * i + 2]);
        }
    }
}

}  // namespace

#define FOR_DTYPE(T, NAME)                                                                                             \
    extern "C" int sweep_##NAME(                                                                                       \
        const T* first, const T* second, int64_t n, const int64_t* cuts, int64_t segments, int64_t threads, T* ratio,  \
        T* weight, double* table, double* out) {                                                                       \
        return sweep(first, second, n, cuts, segments, threads, ratio, weight, table, out);                            \
    }                                                                                                                  \
    extern "C" int segment_sums_##NAME(                                                                                \
        const T* x, int64_t n, const int64_t* cuts, int64_t segments, int64_t threads, double* out) {                  \
        return segment_sums(x, n, cuts, segments, threads, out);                                                       \
    }                                                                                                                  \
    extern "C" int reweighted_tv_##NAME(                                                                               \
        const T* log_rho, const T* l, int64_t n, const int64_t* cuts, int64_t segments, int64_t threads,               \
        double* table, double* out) {                                                                                  \
        return reweighted_tv(log_rho, l, n, cuts, segments, threads, table, out);                                      \
    }                                                                                                                  \
    extern "C" void digits_##NAME(const T* x, int64_t n, double* out) { digits(x, n, out); }                           \
    extern "C" void digits_of_exp_##NAME(const T* x, int64_t n, double* out) { digits_of_exp(x, n, out); }             \
    extern "C" void inside_##NAME(                                                                                     \
        int64_t what, const T* x, int64_t n, int64_t threads, const double* bounds, uint8_t* marks) {                  \
        inside_of(what, x, n, threads, bounds, marks);                                                                 \
    }                                                                                                                  \
    extern "C" void exponentials_##NAME(const T* x, int64_t n, int64_t threads, T* weight) {                           \
        exponentials(x, n, threads, weight);                                                                           \
    }                                                                                                                  \
    extern "C" void limited_weights_##NAME(                                                                            \
        const T* x, const T* weight, int64_t n, int64_t threads, const double* limits, T* out, uint8_t* limited) {     \
        limited_weights(x, weight, n, threads, limits, out, limited);                                                  \
    }                                                                                                                  \
    extern "C" int weight_sums_##NAME(                                                                                 \
        const T* weight, int64_t n, const int64_t* cuts, int64_t segments, int64_t threads, double* table,             \
        double* out) {                                                                                                 \
        return weight_sums(weight, n, cuts, segments, threads, table, out);                                            \
    }                                                                                                                  \
    extern "C" void histogram_##NAME(                                                                                  \
        const T* x, int64_t n, int64_t low, int64_t side, int64_t* counts, double* moments) {                          \
        histogram(x, n, low, side, counts, moments);                                                                   \
    }

FOR_DTYPE(float, float32)
FOR_DTYPE(double, float64)
