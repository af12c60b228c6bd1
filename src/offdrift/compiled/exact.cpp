// Exact divergences of two policies from whole rows of scores, and their gradients; see exact.py.
//
// With the scores A and B of one token, over the row's entries a and b (B and b divided by the temperature),
//
//     m = e^(a - A)      x = (b - a) + (A - B)      r = e^x - 1      p = m (1 + r)
//     M = sum m      P = sum p      R = sum m r      C = sum m (r - x)      E = sum m (x e^x - r)      Q = sum m r^2
//
// and u = R / M, D = -log(1 + u), the difference of the two log-normalizers, one sweep is enough for all numbers but one:
//
//     KL(mu || pi) = C / M - (u + D)      KL(pi || mu) = E / P + u / (1 + u) + D      chi2 = (Q / M - u^2) / (1 + u)^2
//     H(mu) = log M - sum m (a - A) / M      H(pi) = log P - sum p (b - B) / P      sum pi^2 = sum p^2 / P^2
//
// TV = 1 / (2 P) sum |m r - u m| has a kink that moves with u: the sweep leaves m and m r in the cache for it.
//
// A and B are of the likeliest token of mu, where x is small if the policies are near each other, so that nothing large
// cancels; where something does, the row is swept again with B moved by D. Vectors are float32, the sums of each block
// of a row are joined in float64. A row belongs to one thread, so the number of threads changes no bit.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint16_t S __attribute__((vector_size(2 * LANES)));
typedef float Half __attribute__((vector_size(2 * LANES)));
typedef double D __attribute__((vector_size(4 * LANES)));  // as many as Half

constexpr int64_t BLOCK = 2048;
constexpr int64_t SHARE = 1 << 16;  // entries that a thread takes at a time
constexpr float INF = INFINITY;
constexpr float MOST = 3.4028235e38f;
constexpr float NEAR = 0.75f;      // |x| that the polynomial reaches
constexpr float LOWEST = -87.0f;   // e^x is 0 below, in float32
constexpr float HIGHEST = 88.0f;   // and infinite above
constexpr double CANCELS = 8.0;    // times a number that is left of a difference
constexpr double APART = 8.0;      // distance of A and B from which differences of scores round too much

inline V all(float x) { return V{} + x; }
inline V lower_of(V a, V b) { return b < a ? b : a; }  // NaN in a stays
inline V higher_of(V a, V b) { return b > a ? b : a; }
inline V magnitude(V x) { return (V)((I)x & INT32_MAX); }
inline V load(const float* x) {
    V v;
    std::memcpy(&v, x, sizeof v);
    return v;
}
inline void store(float* x, V v) { std::memcpy(x, &v, sizeof v); }

inline D widened(V x) {
    Half half[2];
    std::memcpy(half, &x, sizeof x);
    return __builtin_convertvector(half[0], D) + __builtin_convertvector(half[1], D);
}
inline double added(D x) {
    double sum = 0.0;
    for (int i = 0; i < LANES / 2; i++) sum += x[i];
    return sum;
}
inline float greatest(V x) {
    float top = x[0];
    for (int i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
}

// e^x, LOWEST <= x <= HIGHEST. x / log 2 = k + f, |f| <= 1/2; a polynomial with a relative error of 2e-9 for 2^f.
inline V exponential(V x) {
    const V magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
    V shifted = x * 1.44269504f + magic;
    V f = x * 1.44269504f - (shifted - magic);
    V s = all(0.0001534581242594868f);
    s = s * f + 0.0013399930903688073f;
    s = s * f + 0.009618489071726799f;
    s = s * f + 0.05550328642129898f;
    s = s * f + 0.24022646248340607f;
    s = s * f + 0.6931471824645996f;
    s = s * f + 1.0f;
    return (V)(((U)shifted << 23) + (U)s);
}
inline V exponential_of_any(V x) {
    V e = exponential(lower_of(higher_of(x, all(LOWEST)), all(HIGHEST)));
    e = x < LOWEST ? V{} : e;
    return x > HIGHEST ? all(INF) : e;
}

// e^x - 1 - x for |x| <= NEAR: the interpolant of (e^x - 1 - x - x^2 / 2) / x^3 at Chebyshev's five points.
inline V expm1_minus(V x) {
    V s = all(0.0002003602643017344f);
    s = s * x + 0.0014064369329705383f;
    s = s * x + 0.008333059106967104f;
    s = s * x + 0.04166419512076682f;
    s = s * x + 0.16666666666666666f;
    s = s * x + 0.5f;
    return x * x * s;
}

// Scores as they come, and as float32.

enum { FLOAT32, BFLOAT16, FLOAT16 };

inline V from_half(U bits) {
    V x = (V)((bits & 0x7fff) << 13) * 0x1p112f;
    x = x >= 65536.0f ? (V)((U)x | 0x7f800000u) : x;
    return (V)((U)x | (bits & 0x8000) << 16);
}
inline U to_bfloat16(V x) {
    U bits = (U)x;
    U rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return x == x ? rounded : bits >> 16 | 0x40;
}
inline U to_half(V x) {
    U sign = (U)x & 0x80000000u, bits = (U)x ^ sign;
    U small = (U)((V)bits + 0.5f) - 0x3f000000u;  // below 2^-14: the addition rounds
    U normal = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
    U half = bits < (113u << 23) ? small : normal;
    half = bits >= (143u << 23) ? U{} + 0x7c00 : half;
    half = bits > 0x7f800000u ? U{} + 0x7e00 : half;
    return half | sign >> 16;
}

// Entries of one row: pointers to float32 numbers, which lie there or in the buffer, with -inf up to whole vectors.
struct Scores {
    const char* rows;
    int64_t dtype, stride;

    const char* row(int64_t i) const { return rows + i * stride * (dtype == FLOAT32 ? 4 : 2); }

    const float* block(const char* row, int64_t start, int64_t n, float* buffer) const {
        if (dtype == FLOAT32 && n % LANES == 0) return (const float*)row + start;
        if (dtype == FLOAT32) {
            std::memcpy(buffer, (const float*)row + start, 4 * n);
            for (int64_t i = n; i % LANES; i++) buffer[i] = -INF;
            return buffer;
        }
        const uint16_t* from = (const uint16_t*)row + start;
        for (int64_t i = 0; i < n; i += LANES) {
            S bits;
            if (n - i >= LANES) {
                std::memcpy(&bits, from + i, sizeof bits);
            } else {
                for (int j = 0; j < LANES; j++) bits[j] = dtype == BFLOAT16 ? 0xff80 : 0xfc00;
                std::memcpy(&bits, from + i, 2 * (n - i));
            }
            U wide = __builtin_convertvector(bits, U);
            store(buffer + i, dtype == BFLOAT16 ? (V)(wide << 16) : from_half(wide));
        }
        return buffer;
    }

    float at(const char* row, int64_t i) const {
        float buffer[LANES];
        return *block(row, i, 1, buffer);
    }
};

void write(char* row, int64_t dtype, int64_t start, V x, int64_t n) {
    if (dtype == FLOAT32) {
        std::memcpy((float*)row + start, &x, 4 * n);
    } else {
        S bits = __builtin_convertvector(dtype == BFLOAT16 ? to_bfloat16(x) : to_half(x), S);
        std::memcpy((uint16_t*)row + start, &bits, 2 * n);
    }
}

// What a thread works in: two blocks as float32, and m and m r of a row.
struct Room {
    std::vector<float> a, b, m, moved;
    explicit Room(int64_t width) : a(BLOCK), b(BLOCK), m(width), moved(width) {}
};

// Calls f(row, room) for each row, on so many threads.
template <class F> void by_rows(int64_t n, int64_t v, int64_t threads, int64_t width, F f) {
    int64_t step = std::max<int64_t>(1, SHARE / v);
    std::atomic<int64_t> next{0};
    auto work = [&](Room& room) {
        for (int64_t i = next.fetch_add(step); i < n; i = next.fetch_add(step))
            for (int64_t j = i; j < std::min(n, i + step); j++) f(j, room);
    };
    threads = std::max<int64_t>(1, std::min(threads, (n + step - 1) / step));
    std::vector<Room> rooms(threads, Room(width));
    std::vector<std::thread> running;
    try {
        for (int64_t i = 1; i < threads; i++) running.emplace_back(work, std::ref(rooms[i]));
    } catch (...) {}  // those that run do all of it
    work(rooms[0]);
    for (auto& t : running) t.join();
}

// Of a row, relative to A and B.
enum { M, P, R, C, E, Q, A_M, B_P, P2, SUMS };

// What a row's sums are relative to: p is e^((b - B) / T + shift), x is (b / T - a) + apart. Scores, A and B are less
// integers near A and B, if those are far apart.
struct Reference {
    float a, b, from_a, from_b, over_t, over_t_rest, apart, shift, top;  // top: of log p, which entropies are relative to
    double lost;                                                         // of apart, by rounding

    Reference(float score_a, float score_b, double t) : from_a(0), from_b(0), over_t(float(1 / t)), top(0) {
        over_t_rest = float(1 / t - over_t);
        if (!(std::fabs(score_a - score_b / t) < APART)) from_a = std::rint(score_a), from_b = std::rint(score_b);
        a = score_a - from_a, b = score_b - from_b;
        move(0.0);
    }
    void move(double by) {
        double exact = a - b * (double(over_t) + over_t_rest) + by;
        apart = float(exact), shift = float(by), lost = apart - exact;
    }
};

// The sums with a block by the polynomial; false if some |x| is beyond it, or not finite.
template <bool TV>
bool near_block(const float* a, const float* b, int64_t n, const Reference& at, D* sums, float* keep_m, float* keep_r) {
    V total{}, moved_sum{}, curved_sum{}, moved_x{}, rises{}, a_m{}, a_p{}, squares{}, furthest{};
    auto step = [&](int64_t i, V a, V b, I inside, bool masked) __attribute__((always_inline)) {
        V d = higher_of(a - at.a, all(LOWEST));
        V x = (b * at.over_t - a) + (b * at.over_t_rest + at.apart);
        V m = exponential(d);
        if (masked) x = inside ? x : V{};  // m is e^LOWEST there
        V curved = expm1_minus(x), rise = x + curved, moved = m * rise, p = m + moved;
        total += m, moved_sum += moved, curved_sum += m * curved, moved_x += moved * x, rises += moved * rise;
        a_m += m * d, a_p += p * d, squares += p * p;
        furthest = higher_of(furthest, x * x);
        if (TV) store(keep_m + i, m), store(keep_r + i, moved);
    };
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) step(i, load(a + i), load(b + i), I{}, false);
    if (i < n) {
        I lane;
        for (int j = 0; j < LANES; j++) lane[j] = j;
        step(i, load(a + i), load(b + i), lane < int32_t(n - i), true);
    }
    V sane = 0.0f * (curved_sum + moved_x + rises + a_m + a_p + squares);
    if (!(greatest(furthest) < NEAR * NEAR) || !(added(widened(sane)) == 0.0)) return false;
    D t = widened(total), r = widened(moved_sum), c = widened(curved_sum), s = widened(moved_x);
    sums[M] += t, sums[P] += t + r, sums[R] += r, sums[C] += c, sums[E] += s - c, sums[Q] += widened(rises);
    sums[A_M] += widened(a_m), sums[B_P] += widened(a_p) + (r - c) + s - at.top * (t + r), sums[P2] += widened(squares);
    return true;
}

// p x, with 0 log 0 = 0: what one policy alone can draw counts even where its exponential underflows.
inline V product_or(float otherwise, V p, V x) {
    V y = p * x;
    return y == y ? y : all(otherwise);
}

// The sums with a block of any numbers, as `exact.all_terms` has them; the largest b - B, beyond which p is infinite.
template <bool TV>
float any_block(const float* a, const float* b, int64_t n, const Reference& at, D* sums, float* keep_m, float* keep_r) {
    V sum[SUMS] = {};
    V highest = all(-INF);
    for (int64_t i = 0; i < n; i += LANES) {  // beyond the row: tokens that neither policy can draw
        V a_i = load(a + i), b_i = load(b + i);
        V d = a_i - at.a, y = b_i - at.b;
        y = y * at.over_t + (higher_of(y, all(-MOST)) * at.over_t_rest + at.shift);
        V x = (b_i * at.over_t - a_i) + (higher_of(b_i, all(-MOST)) * at.over_t_rest + at.apart);
        I near = magnitude(x) < NEAR;
        x = x == x ? x : V{};  // neither can draw it; a NaN of either policy is in m or e
        V m = exponential_of_any(d), e = exponential_of_any(y), curved = expm1_minus(x), rise = x + curved;
        V moved = near ? m * rise : e - m;
        V p = near ? m + moved : e;
        V m_x = product_or(-INF, m, lower_of(x, all(MOST))), p_x = product_or(INF, p, higher_of(x, all(-MOST)));
        sum[M] += m, sum[P] += p, sum[R] += moved;
        sum[C] += near ? m * curved : moved - m_x;
        sum[E] += near ? m * (x * rise - curved) : p_x - moved;
        sum[Q] += near ? moved * rise : exponential_of_any(y + x) - p - moved;
        sum[A_M] += m * higher_of(d, all(-MOST));
        sum[B_P] += p * higher_of((near ? d + x : y) - at.top, all(-MOST));
        sum[P2] += p * p;
        highest = higher_of(highest, y);
        if (TV) store(keep_m + i, m), store(keep_r + i, moved);
    }
    for (int k = 0; k < SUMS; k++) sums[k] += widened(sum[k]);
    return greatest(highest);
}

// The largest score of a row, and an entry that has it; NaN is passed over.
struct Top {
    float score;
    int64_t at;
};
Top largest(const Scores& scores, const char* row, int64_t v, float* buffer) {
    Top top{-INF, 0};
    for (int64_t start = 0; start < v; start += BLOCK) {
        int64_t n = std::min(BLOCK, v - start);
        const float* x = scores.block(row, start, n, buffer);
        V high[4] = {all(-INF), all(-INF), all(-INF), all(-INF)};
        int64_t i = 0;
        for (; i + 4 * LANES <= n; i += 4 * LANES)
            for (int k = 0; k < 4; k++) high[k] = higher_of(high[k], load(x + i + k * LANES));
        for (; i < n; i += LANES) high[0] = higher_of(high[0], load(x + i));
        float found = greatest(higher_of(higher_of(high[0], high[1]), higher_of(high[2], high[3])));
        if (found > top.score) {
            int64_t j = 0;
            while (x[j] != found) j++;
            top = {found, start + j};
        }
    }
    return top;
}

// Fields of `ExactDivergences`, and both log-normalizers, each a score and the rest: log p = (score - high) / T - low.
enum { LOGP_MU = 7, LOGP_PI, FIELDS };
enum { HIGH_MU, LOW_MU, HIGH_PI, LOW_PI, NORMALIZERS };
struct Numbers {
    double field[FIELDS], z[NORMALIZERS];
};

struct Pair {
    Scores mu, pi;
    int64_t n, v;
    double temperature;
};

// Scores less a number; in the buffer, if it is not 0.
const float* less(const float* x, float from, int64_t n, float* buffer) {
    if (from == 0) return x;
    for (int64_t i = 0; i < n; i += LANES) store(buffer + i, load(x + i) - from);
    return buffer;
}

template <bool TV> float sweep(const Pair& both, int64_t i, const Reference& at, Room& room, double* totals) {
    const char *row_mu = both.mu.row(i), *row_pi = both.pi.row(i);
    D sums[SUMS] = {};
    float highest = -INF;
    bool near = true;
    for (int64_t start = 0; start < both.v; start += BLOCK) {
        int64_t n = std::min(BLOCK, both.v - start);
        const float* a = less(both.mu.block(row_mu, start, n, room.a.data()), at.from_a, n, room.a.data());
        const float* b = less(both.pi.block(row_pi, start, n, room.b.data()), at.from_b, n, room.b.data());
        float *m = TV ? &room.m[start] : nullptr, *r = TV ? &room.moved[start] : nullptr;
        near = near && near_block<TV>(a, b, n, at, sums, m, r);  // a row that has left it once will do so again
        if (!near) highest = std::max(highest, any_block<TV>(a, b, n, at, sums, m, r));
    }
    for (int k = 0; k < SUMS; k++) totals[k] = added(sums[k]);
    return highest;
}

double half_l1(const Room& room, int64_t v, float u) {
    D total{};
    for (int64_t start = 0; start < v; start += BLOCK) {
        V sum[2] = {};
        int64_t i = start, stop = std::min(v, start + BLOCK);
        for (; i + 2 * LANES <= stop; i += 2 * LANES)
            for (int k = 0; k < 2; k++)
                sum[k] += magnitude(load(&room.moved[i + k * LANES]) - u * load(&room.m[i + k * LANES]));
        for (; i < stop; i += LANES) sum[0] += magnitude(load(&room.moved[i]) - u * load(&room.m[i]));
        total += widened(sum[0] + sum[1]);
    }
    return added(total) / 2;
}

// u - log(1 + u), for numbers of any size.
double beyond_log(double u) {
    if (std::fabs(u) < 1e-3) return u * u * (0.5 - u * (1.0 / 3 - u * (0.25 - u * 0.2)));
    return u - std::log1p(u);
}

template <bool TV> void numbers_of_row(const Pair& both, int64_t i, Room& room, Numbers& out) {
    Top top = largest(both.mu, both.mu.row(i), both.v, room.a.data());
    auto top_of_pi = [&] { return largest(both.pi, both.pi.row(i), both.v, room.b.data()).score; };
    float b = both.pi.at(both.pi.row(i), top.at);
    Reference at(top.score, std::isfinite(b) ? b : top_of_pi(), both.temperature);
    double sums[SUMS], u, gap, gap_back, kl, kl_back;
    float highest = sweep<TV>(both, i, at, room, sums);
    if (!(highest < 60.0f)) {  // some p may be infinite
        at = Reference(top.score, top_of_pi(), both.temperature);
        highest = sweep<TV>(both, i, at, room, sums);
    }
    for (bool again = false;; again = true) {
        double d = std::log(sums[P] / sums[M]);
        u = sums[R] / sums[M], gap = beyond_log(u), gap_back = beyond_log(-u / (1 + u));
        kl = sums[C] / sums[M] - gap, kl_back = sums[E] / sums[P] - gap_back;
        bool cancels = std::fabs(d) > 1 || gap > CANCELS * kl + 1e-13 || gap_back > CANCELS * kl_back + 1e-13;
        if (again || !cancels) break;
        at.move(-d), at.top = std::max(0.0f, highest - float(d));
        sweep<TV>(both, i, at, room, sums);
    }
    double m = sums[M], p = sums[P];
    double lost = std::fabs(at.lost) < 1 ? at.lost : 0.0;  // of scores beyond 1e7 float32 holds no nat
    double z[NORMALIZERS] = {top.score, std::log(m), at.b + at.from_b, std::log(p) - at.shift - lost};
    double nan_or_0 = std::isfinite(m + p + sums[A_M] + sums[B_P]) ? 0.0 : NAN;
    double fields[FIELDS] = {
        std::max(kl, 0.0), std::max(kl_back, 0.0), TV ? std::min(half_l1(room, both.v, float(u)) / p, 1.0) : NAN,
        std::max((sums[Q] / m - u * u) * (m / p) * (m / p), 0.0), std::max(z[LOW_MU] - sums[A_M] / m, 0.0),
        std::max(std::log(p) - at.top - sums[B_P] / p, 0.0), sums[P2] / (p * p), NAN, NAN};
    for (int k = 0; k < FIELDS; k++) out.field[k] = fields[k] + nan_or_0;
    for (int k = 0; k < NORMALIZERS; k++) out.z[k] = z[k] + nan_or_0;
}

template <bool TV>
void numbers_of(const Pair& both, const int64_t* tokens, int64_t threads, float* fields, double* normalizers) {
    int64_t width = TV ? (both.v + LANES - 1) / LANES * LANES : 0;
    by_rows(both.n, both.v, threads, width, [&](int64_t i, Room& room) {
        Numbers row;
        numbers_of_row<TV>(both, i, room, row);
        if (tokens && tokens[i] >= 0 && tokens[i] < both.v) {
            double a = both.mu.at(both.mu.row(i), tokens[i]);
            double b = both.pi.at(both.pi.row(i), tokens[i]);
            row.field[LOGP_MU] = (a - row.z[HIGH_MU]) - row.z[LOW_MU];
            row.field[LOGP_PI] = (b - row.z[HIGH_PI]) / both.temperature - row.z[LOW_PI];
            for (int k : {LOGP_MU, LOGP_PI}) row.field[k] = row.field[k] > 0 ? 0.0 : row.field[k];
        }
        for (int k = 0; k < FIELDS; k++) fields[k * both.n + i] = float(row.field[k]);
        for (int k = 0; k < NORMALIZERS; k++) normalizers[k * both.n + i] = row.z[k];
    });
}

// Gradients, with the normalizers known: the names of `losses`, in the order of exact.Loss.

enum { KL_ROLLOUT_CURRENT, KL_CURRENT_ROLLOUT, ENTROPY };

template <int OF>
void gradient_of_row(const Pair& both, int64_t i, double upstream, double value, const double* z, Room& room, char* out) {
    double over_t_d = 1 / both.temperature, high_mu = z[i], low_mu = z[both.n + i], high_pi = z[2 * both.n + i];
    double low_pi = z[3 * both.n + i];
    float over_t = float(over_t_d), rest = float(over_t_d - over_t), slope = float(upstream / both.temperature);
    float apart = float((high_mu - high_pi * over_t_d) + (low_mu - low_pi));
    float scale_mu = float(std::exp(-low_mu)), scale_pi = float(std::exp(-low_pi));
    float subtracted = float(OF == ENTROPY ? value - low_pi : value == double(INF) ? NAN : value);
    for (int64_t start = 0; start < both.v; start += BLOCK) {
        int64_t n = std::min(BLOCK, both.v - start);
        const float* b = both.pi.block(both.pi.row(i), start, n, room.b.data());
        const float* a = OF == ENTROPY ? b : both.mu.block(both.mu.row(i), start, n, room.a.data());
        for (int64_t j = 0; j < n; j += LANES) {
            V a_j = load(a + j), b_j = load(b + j);
            V y = b_j - float(high_pi);
            y = y * over_t + y * rest;
            V pi = exponential_of_any(y) * scale_pi;  // a log-prob would be rounded twice
            V x = (b_j * over_t - a_j) + (b_j * rest + apart), moved;
            if (OF == KL_ROLLOUT_CURRENT) {
                V mu = exponential_of_any(a_j - float(high_mu)) * scale_mu;
                moved = magnitude(x) < NEAR ? mu * (x + expm1_minus(x)) : pi - mu;
            }
            if (OF == KL_CURRENT_ROLLOUT) moved = pi * higher_of(x - subtracted, all(-MOST));
            if (OF == ENTROPY) moved = -pi * higher_of(y + subtracted, all(-MOST));
            moved = b_j == -INF ? V{} : slope * moved;
            if (slope == 0) moved = V{};
            write(out, both.pi.dtype, start + j, moved, std::min<int64_t>(LANES, n - j));
        }
    }
}

Pair pair_of(const void* mu, const void* pi, const int64_t* shape, double temperature) {
    return {{(const char*)mu, shape[2], shape[4]}, {(const char*)pi, shape[3], shape[5]}, shape[0], shape[1], temperature};
}

}  // namespace

// `shape`: rows, entries, both dtypes, both strides of rows.

extern "C" int exact_rows(
    const void* mu, const void* pi, const int64_t* shape, const double* temperature, const int64_t* tokens, int64_t tv,
    int64_t threads, float* fields, double* normalizers) try {
    Pair both = pair_of(mu, pi, shape, *temperature);
    (tv ? numbers_of<true> : numbers_of<false>)(both, tokens, threads, fields, normalizers);
    return 1;
} catch (...) {
    return 0;
}

// `of_rows`: the incoming gradients, the values, the four columns of normalizers.
extern "C" int gradient_rows(
    const void* mu, const void* pi, const int64_t* shape, const double* temperature, int64_t of, const double* of_rows,
    int64_t threads, void* out) try {
    Pair both = pair_of(mu, pi, shape, *temperature);
    auto row = of == ENTROPY              ? gradient_of_row<ENTROPY>
               : of == KL_ROLLOUT_CURRENT ? gradient_of_row<KL_ROLLOUT_CURRENT>
                                          : gradient_of_row<KL_CURRENT_ROLLOUT>;
    Scores written{(const char*)out, both.pi.dtype, both.v};
    by_rows(both.n, both.v, threads, 0, [&](int64_t i, Room& room) {
        row(both, i, of_rows[i], of_rows[both.n + i], of_rows + 2 * both.n, room, const_cast<char*>(written.row(i)));
    });
    return 1;
} catch (...) {
    return 0;
}
