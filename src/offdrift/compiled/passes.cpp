// Passes over packed tokens that the statistics, gates and weights of a batch are made of; see passes.py.
//
// Eight doubles at a time, in an order that is fixed by the tokens alone: blocks of BLOCK tokens, or one segment, belong
// to one thread, and their results are joined one after the other. So the number of threads changes no bit.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

typedef double V __attribute__((vector_size(64)));
typedef int64_t I __attribute__((vector_size(64)));
constexpr int LANES = 8;
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

// The last tokens, filled up with a number that adds nothing.
template <class T> inline V load_some(const T* x, int64_t n, T filler) {
    T some[LANES];
    for (int i = 0; i < LANES; i++) some[i] = i < n ? x[i] : filler;
    return load(some);
}

// A byte for each lane, 1 where it is marked.
inline void write_marks(I lanes, uint8_t* out, int64_t some) {
    typedef uint8_t B __attribute__((vector_size(LANES)));
    B marks = __builtin_convertvector(lanes & 1, B);
    std::memcpy(out, &marks, some);
}

inline double added(V x) { return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])); }
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
// e^x; 0 below -700, where float64 ends.
template <class T> inline V exp(V x) {
    V scale, rest;
    exponential<T>(largest(x, all(-700.0)), scale, rest);
    V e = scale * rest + scale;
    return x < -700.0 ? V{} : e;
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

// Order of drift.TOKEN_SUMS, then TOKEN_MAXIMA, then TOKEN_LOGS.
enum { L, L_LIMITED, L2, ABS, K3, EXCESS_ABS, W, W2, P, P2, D, D2, PD, D_ABS, L_MAX, L_MIN, D_MAX, LOG_W, LOG_W2, ROW };

inline double bigger(double a, double b) { return a != a || a > b ? a : b; }  // NaN wins

// A block with a log-ratio beyond the limit, or NaN: token by token, as the definitions are.
template <class T> void careful_block(const T* first, const T* raw, int64_t n, double* row) {
    double top = -INF;
    for (int i = 0; i < ROW; i++) row[i] = 0.0;
    row[L_MAX] = row[L_MIN] = row[D_MAX] = -INF;
    for (int64_t t = 0; t < n; t++) {
        double l = raw[t], limited = clamped(l), excess = std::expm1(limited), p = std::exp(double(first[t]));
        double d = l <= LIMIT ? p * excess : std::exp(double(first[t]) + l) - p;
        row[L] += l, row[L_LIMITED] += limited, row[L2] += limited * limited, row[ABS] += std::fabs(l);
        row[K3] += excess - limited, row[EXCESS_ABS] += std::fabs(excess);
        row[W] += 1 + excess, row[W2] += (1 + excess) * (1 + excess);
        row[P] += p, row[P2] += p * p, row[D] += d, row[D2] += d * d, row[PD] += p * d, row[D_ABS] += std::fabs(d);
        row[L_MAX] = bigger(l, row[L_MAX]), row[L_MIN] = bigger(-l, row[L_MIN]);
        row[D_MAX] = bigger(std::fabs(d), row[D_MAX]);
    }
    top = std::max(row[L_MAX], -1.7976931348623157e308);  // of -inf alone: no -inf - -inf below
    double w = 0.0, w2 = 0.0;
    for (int64_t t = 0; t < n; t++) {
        double e = std::exp(double(raw[t]) - top);
        w += e, w2 += e * e;
    }
    row[LOG_W] = std::log(w) + top, row[LOG_W2] = std::log(w2) + 2 * top;
}

template <class T> void token_block(const T* first, const T* raw, int64_t n, double* row) {
    V l_sum{}, l2{}, abs{}, k3{}, excess_abs{}, more{}, more2{}, p_sum{}, p2{}, d_sum{}, d2{}, pd{}, d_abs{};
    V high = all(-INF), low = all(INF), d_max{};
    auto step = [&](V f, V l) {
        V excess = expm1<T>(clamped(l)), p = exp<T>(f), d = p * excess, size = magnitude(d);
        l_sum += l, l2 += l * l, abs += magnitude(l), k3 += excess - l, excess_abs += magnitude(excess);
        more += excess, more2 += excess * excess, p_sum += p, p2 += p * p;
        d_sum += d, d2 += d * d, pd += p * d, d_abs += size;
        d_max = largest(d_max, size);
    };
    int64_t t = 0;
    for (; t + LANES <= n; t += LANES) {
        V l = load(raw + t);
        high = largest(high, l), low = least(low, l);
        step(load(first + t), l);
    }
    if (t < n) {
        V l = load_some(raw + t, n - t, raw[t]);
        high = largest(high, l), low = least(low, l);
        step(load_some(first + t, n - t, T(-INF)), load_some(raw + t, n - t, T(0)));
    }
    double top = greatest(high), bottom = -greatest(-low), sum = added(l_sum);
    if (!(top <= LIMIT && bottom >= -LIMIT && sum == sum)) return careful_block(first, raw, n, row);
    row[L] = row[L_LIMITED] = sum, row[L2] = added(l2), row[ABS] = added(abs), row[K3] = added(k3);
    row[EXCESS_ABS] = added(excess_abs);
    double e = added(more), e2 = added(more2);
    row[W] = n + e, row[W2] = n + 2 * e + e2;
    row[P] = added(p_sum), row[P2] = added(p2), row[D] = added(d_sum), row[D2] = added(d2), row[PD] = added(pd);
    row[D_ABS] = added(d_abs), row[L_MAX] = top, row[L_MIN] = -bottom, row[D_MAX] = greatest(d_max);
    row[LOG_W] = std::log(row[W]), row[LOG_W2] = std::log(row[W2]);
}

// log(e^a + e^b)
double log_plus(double a, double b) {
    if (a == -INF) return b;
    if (b == -INF) return a;
    double top = bigger(a, b);
    return top + std::log1p(std::exp(std::min(a, b) - top));
}

template <class T> void token_sums(const T* first, const T* raw, int64_t n, int64_t threads, double* out) {
    int64_t blocks = (n + BLOCK - 1) / BLOCK;
    std::vector<double> table(blocks * ROW);
    shared(blocks, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++)
            token_block(first + i * BLOCK, raw + i * BLOCK, std::min(BLOCK, n - i * BLOCK), &table[i * ROW]);
    });
    for (int i = 0; i < ROW; i++) out[i] = i < L_MAX ? 0.0 : -INF;
    for (int64_t b = 0; b < blocks; b++)
        for (int i = 0; i < ROW; i++) {
            double x = table[b * ROW + i];
            out[i] = i < L_MAX ? out[i] + x : i < LOG_W ? bigger(x, out[i]) : log_plus(out[i], x);
        }
}

// Statistics of a log-ratio, in the order of passes.Statistic.
struct Itself { template <class T> static V of(V l) { return l; } };
struct Clamped { template <class T> static V of(V l) { return clamped(l); } };
struct HalfSquare { template <class T> static V of(V l) { l = clamped(l); return l * l * 0.5; } };
struct Bregman { template <class T> static V of(V l) { l = clamped(l); return expm1<T>(l) - l; } };
struct Magnitude { template <class T> static V of(V l) { return magnitude(clamped(l)); } };
struct RatioError { template <class T> static V of(V l) { return magnitude(expm1<T>(clamped(l))); } };

template <class F, class T>
void segment_sums(const T* x, const int64_t* cuts, int64_t segments, int64_t threads, double* out) {
    shared(segments, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            V a{}, b{};
            int64_t t = cuts[i], stop = cuts[i + 1];
            for (; t + 2 * LANES <= stop; t += 2 * LANES) {
                a += F::template of<T>(load(x + t));
                b += F::template of<T>(load(x + t + LANES));
            }
            for (; t < stop; t += LANES)  // 0 adds 0 to each of them
                a += F::template of<T>(load_some(x + t, stop - t, T(0)));
            out[i] = added(a + b);
        }
    });
}

// Whether the segments are parts of n tokens; nothing is read or written if they are not.
template <class T>
int segment_sums_of(
    int64_t what, const T* x, int64_t n, const int64_t* cuts, int64_t segments, int64_t threads, double* out) {
    if (segments < 0 || cuts[0] < 0 || cuts[segments] > n || !std::is_sorted(cuts, cuts + segments + 1)) return 0;
    void (*const passes[])(const T*, const int64_t*, int64_t, int64_t, double*) = {
        segment_sums<Itself, T>, segment_sums<Clamped, T>, segment_sums<HalfSquare, T>,
        segment_sums<Bregman, T>, segment_sums<Magnitude, T>, segment_sums<RatioError, T>};
    passes[what](x, cuts, segments, threads, out);
    return 1;
}

// Marks the tokens whose statistic lies within [bounds[0], bounds[1]]; NaN does not.
template <class F, class T> void inside(const T* x, int64_t n, int64_t threads, const double* bounds, uint8_t* marks) {
    V low = all(T(bounds[0])), high = all(T(bounds[1]));
    shared((n + BLOCK - 1) / BLOCK, threads, [&](int64_t begin, int64_t end) {
        int64_t stop = std::min(n, end * BLOCK);
        for (int64_t t = begin * BLOCK; t < stop; t += LANES) {
            int64_t some = std::min<int64_t>(LANES, stop - t);
            V y = F::template of<T>(some == LANES ? load(x + t) : load_some(x + t, some, T(0)));
            write_marks((y >= low) & (y <= high), marks + t, some);
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

// W = e^x within +-LIMIT; beyond a limit, in logs, it becomes `above` or `below` and is marked.
template <class T>
void limited_weights(const T* x, int64_t n, int64_t threads, const double* limits, T* weight, uint8_t* limited) {
    T log_cap = T(limits[0]), log_floor = T(limits[1]);  // compared in the tokens' own dtype
    double above = T(limits[2]), below = T(limits[3]);
    typedef T W __attribute__((vector_size(LANES * sizeof(T))));
    shared((n + BLOCK - 1) / BLOCK, threads, [&](int64_t begin, int64_t end) {
        int64_t stop = std::min(n, end * BLOCK);
        for (int64_t t = begin * BLOCK; t < stop; t += LANES) {
            int64_t some = std::min<int64_t>(LANES, stop - t);
            V l = clamped(some == LANES ? load(x + t) : load_some(x + t, some, T(0)));
            V e = expm1<T>(l) + 1.0;
            I high = l > double(log_cap), low = l < double(log_floor);
            e = high ? all(above) : e;
            e = low ? all(below) : e;
            W w = __builtin_convertvector(e, W);
            std::memcpy(weight + t, &w, some * sizeof(T));
            write_marks(high | low, limited + t, some);
        }
    });
}

// Sums of w, w^2 and of w other than 1, maxima of w and of -w.
template <class T> void weight_sums(const T* weight, int64_t n, int64_t threads, double* out) {
    int64_t blocks = (n + BLOCK - 1) / BLOCK;
    std::vector<double> table(blocks * 5);
    shared(blocks, threads, [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; b++) {
            V w1{}, w2{}, high = all(-INF), low = all(INF);
            I changed{};
            int64_t t = b * BLOCK, stop = std::min(n, t + BLOCK);
            for (; t + LANES <= stop; t += LANES) {
                V w = load(weight + t);
                w1 += w, w2 += w * w, changed -= w != 1.0;
                high = largest(high, w), low = least(low, w);
            }
            double* row = &table[b * 5];
            row[0] = added(w1), row[1] = added(w2), row[2] = added(__builtin_convertvector(changed, V));
            row[3] = greatest(high), row[4] = greatest(-low);
            for (; t < stop; t++) {
                double w = weight[t];
                row[0] += w, row[1] += w * w, row[2] += w != 1.0;
                row[3] = bigger(w, row[3]), row[4] = bigger(-w, row[4]);
            }
            if (row[0] != row[0]) row[3] = row[4] = row[0];
        }
    });
    for (int i = 0; i < 5; i++) out[i] = i < 3 ? 0.0 : -INF;
    for (int64_t b = 0; b < blocks; b++)
        for (int i = 0; i < 5; i++) out[i] = i < 3 ? out[i] + table[b * 5 + i] : bigger(table[b * 5 + i], out[i]);
}

// Counts, sums and sums of squares by bin of a histogram.Grid that begins at 2^low and has so many bins on either side.
template <class T>
void histogram(const T* x, int64_t n, int64_t low, int64_t side, int64_t* counts, double* moments) {
    constexpr int64_t ROWS = 65536;  // numerics.BLOCK: the sums are added up as the plain way adds them
    int64_t bins = 2 * side + 1, first = (low + 127) * 4 - 1;
    std::vector<double> sums(2 * bins);
    for (int64_t begin = 0; begin < n; begin += ROWS) {
        std::fill(sums.begin(), sums.end(), 0.0);
        for (int64_t t = begin; t < std::min(n, begin + ROWS); t++) {
            float f = float(x[t]);
            int32_t bits;
            std::memcpy(&bits, &f, sizeof bits);
            int64_t out = std::clamp<int64_t>(((bits & INT32_MAX) >> 21) - first, 0, side);
            int64_t i = side + (bits < 0 ? -out : out);
            double value = x[t];
            counts[i]++, sums[2 * i] += value, sums[2 * i + 1] += value * value;
        }
        for (int64_t i = 0; i < bins; i++) moments[i] += sums[2 * i], moments[bins + i] += sums[2 * i + 1];
    }
}

}  // namespace

#define FOR_DTYPE(T, NAME)                                                                                             \
    extern "C" void token_sums_##NAME(const T* first, const T* raw, int64_t n, int64_t threads, double* out) {         \
        token_sums(first, raw, n, threads, out);                                                                       \
    }                                                                                                                  \
    extern "C" int segment_sums_##NAME(                                                                                \
        int64_t what, const T* x, int64_t n, const int64_t* cuts, int64_t segments, int64_t threads, double* out) {    \
        return segment_sums_of(what, x, n, cuts, segments, threads, out);                                              \
    }                                                                                                                  \
    extern "C" void inside_##NAME(                                                                                     \
        int64_t what, const T* x, int64_t n, int64_t threads, const double* bounds, uint8_t* marks) {                  \
        inside_of(what, x, n, threads, bounds, marks);                                                                 \
    }                                                                                                                  \
    extern "C" void limited_weights_##NAME(                                                                            \
        const T* x, int64_t n, int64_t threads, const double* limits, T* weight, uint8_t* limited) {                   \
        limited_weights(x, n, threads, limits, weight, limited);                                                       \
    }                                                                                                                  \
    extern "C" void weight_sums_##NAME(const T* weight, int64_t n, int64_t threads, double* out) {                     \
        weight_sums(weight, n, threads, out);                                                                          \
    }                                                                                                                  \
    extern "C" void histogram_##NAME(                                                                                  \
        const T* x, int64_t n, int64_t low, int64_t side, int64_t* counts, double* moments) {                          \
        histogram(x, n, low, side, counts, moments);                                                                   \
    }

FOR_DTYPE(float, float32)
FOR_DTYPE(double, float64)
