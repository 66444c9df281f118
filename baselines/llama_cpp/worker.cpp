// llama-worker: greedy decoding with llama.cpp, seen from outside through the public llama.h.
// Prompt ids go in; the chosen ids, the raw f32 logits behind each choice and the time around every llama_decode come
// out. No sampler chain, no chat template, no HTTP: nothing stands between the model and the numbers that are compared.
// Flags are spelled as llama.cpp spells them. llama.cpp's own log goes to stderr, results go to files, or, where it stays
// up for one generation after another (--serve), to stdout.
#include "ggml-backend.h"
#include "llama.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <dlfcn.h>
#ifdef __linux__
#include <csignal>
#include <sys/prctl.h>
#endif

using json = nlohmann::json;
using ids_t = std::vector<llama_token>;

// ---- arguments -----------------------------------------------------------------------------------------------------

struct Args {
    std::string model, out, prompt_ids, force_ids, logits_out, tokenize, override_tensor;
    std::string flash_attn = "on", type_k = "f16", type_v = "f16", prefill = "batched", split_mode = "layer";
    int  n_ctx = 512, n_batch = 512, n_ubatch = 512, n_threads = 1, n_gpu_layers = 0, n_predict = 1;
    bool warmup = false, repack = true, add_special = true, parse_special = true, serve = false;
};

static int to_int(const std::string & flag, const std::string & text) {
    size_t used = 0;
    int value = 0;
    try { value = std::stoi(text, &used); } catch (const std::exception &) { used = 0; }
    if (used == 0 || used != text.size()) throw std::invalid_argument(flag + ": '" + text + "' is not an integer");
    return value;
}

static Args parse_args(int argc, char ** argv) {
    Args a;
    const std::map<std::string, std::string *> strings = {
        {"-m", &a.model}, {"-ot", &a.override_tensor}, {"-sm", &a.split_mode}, {"-fa", &a.flash_attn}, {"-ctk", &a.type_k}, {"-ctv", &a.type_v},
        {"--prompt-ids", &a.prompt_ids}, {"--force-ids", &a.force_ids}, {"--prefill", &a.prefill}, {"--out", &a.out},
        {"--logits-out", &a.logits_out}, {"--tokenize", &a.tokenize}};
    const std::map<std::string, int *> ints = {
        {"-c", &a.n_ctx}, {"-b", &a.n_batch}, {"-ub", &a.n_ubatch}, {"-t", &a.n_threads}, {"--threads", &a.n_threads},
        {"-ngl", &a.n_gpu_layers}, {"-n", &a.n_predict}};
    const std::map<std::string, std::pair<bool *, bool>> switches = {
        {"--serve", {&a.serve, true}},
        {"--warmup", {&a.warmup, true}}, {"--no-warmup", {&a.warmup, false}},
        {"--repack", {&a.repack, true}}, {"--no-repack", {&a.repack, false}},
        {"--no-add-special", {&a.add_special, false}}, {"--no-parse-special", {&a.parse_special, false}}};
    for (int i = 1; i < argc; ++i) {
        const std::string flag = argv[i];
        if (auto s = switches.find(flag); s != switches.end()) { *s->second.first = s->second.second; continue; }
        const bool known = strings.count(flag) || ints.count(flag);
        if (!known) throw std::invalid_argument("unknown flag " + flag);
        if (++i == argc) throw std::invalid_argument(flag + " needs a value");
        if (auto s = strings.find(flag); s != strings.end()) *s->second = argv[i];
        else *ints.at(flag) = to_int(flag, argv[i]);
    }
    if (a.model.empty() || (a.out.empty() && !a.serve)) throw std::invalid_argument("-m MODEL and --out FILE are required");
    if (a.prefill != "batched" && a.prefill != "single") throw std::invalid_argument("--prefill is batched or single");
    if (a.tokenize.empty() && a.prompt_ids.empty()) throw std::invalid_argument("give --prompt-ids or --tokenize");
    return a;
}

static llama_flash_attn_type flash_attn_type(const std::string & name) {
    if (name == "on")   return LLAMA_FLASH_ATTN_TYPE_ENABLED;
    if (name == "off")  return LLAMA_FLASH_ATTN_TYPE_DISABLED;
    if (name == "auto") return LLAMA_FLASH_ATTN_TYPE_AUTO;
    throw std::invalid_argument("-fa: '" + name + "' is not on, off or auto");
}

static llama_split_mode split_mode(const std::string & name) {
    if (name == "none")  return LLAMA_SPLIT_MODE_NONE;
    if (name == "layer") return LLAMA_SPLIT_MODE_LAYER;
    throw std::invalid_argument("-sm: '" + name + "' is not none or layer");
}

static ggml_type cache_type(const std::string & flag, const std::string & name) {
    for (int t = 0; t < GGML_TYPE_COUNT; ++t) {
        const char * candidate = ggml_type_name(ggml_type(t));
        if (candidate && name == candidate) return ggml_type(t);
    }
    throw std::invalid_argument(flag + ": '" + name + "' is not a ggml type");
}

// "REGEX=BUFFER[,REGEX=BUFFER...]", the buffer types being those of the devices that are present (CPU, CUDA0, ...).
// patterns owns the strings that the returned, null-terminated list points to.
static std::vector<llama_model_tensor_buft_override> overrides(const std::string & text, std::list<std::string> & patterns) {
    std::map<std::string, ggml_backend_buffer_type_t> known;
    std::string names;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        auto * type = ggml_backend_dev_buffer_type(ggml_backend_dev_get(i));
        if (type && known.emplace(ggml_backend_buft_name(type), type).second) names += std::string(" ") + ggml_backend_buft_name(type);
    }
    std::vector<llama_model_tensor_buft_override> list;
    std::stringstream parts(text);
    for (std::string part; std::getline(parts, part, ',');) {
        const size_t eq = part.find('=');
        const auto type = eq == std::string::npos ? known.end() : known.find(part.substr(eq + 1));
        if (type == known.end()) throw std::invalid_argument("-ot: '" + part + "' is not REGEX=BUFFER with BUFFER one of:" + names);
        patterns.push_back(part.substr(0, eq));
        list.push_back({patterns.back().c_str(), type->second});
    }
    list.push_back({nullptr, nullptr});
    return list;
}

// ---- files ---------------------------------------------------------------------------------------------------------

static std::string read_file(const std::string & path) {
    std::ifstream in(path, std::ios::binary);
    if (!in) throw std::runtime_error("cannot read " + path);
    return {std::istreambuf_iterator<char>(in), {}};
}

static ids_t read_ids(const std::string & path) {
    std::istringstream in(read_file(path));
    ids_t ids{std::istream_iterator<llama_token>(in), {}};
    if (!in.eof()) throw std::runtime_error(path + " holds something that is not an integer");
    return ids;
}

static void write_json(const std::string & path, const json & value) {
    std::ofstream out(path);
    out << value.dump(1, ' ', true, json::error_handler_t::replace) << '\n';
    if (!out.flush()) throw std::runtime_error("cannot write " + path);
}

// ---- the model -----------------------------------------------------------------------------------------------------

using model_ptr   = std::unique_ptr<llama_model, decltype(&llama_model_free)>;
using context_ptr = std::unique_ptr<llama_context, decltype(&llama_free)>;

static int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static context_ptr make_context(llama_model * model, const Args & a) {
    llama_context_params p = llama_context_default_params();
    p.n_ctx = uint32_t(a.n_ctx);
    p.n_batch = uint32_t(a.n_batch);
    p.n_ubatch = uint32_t(a.n_ubatch);
    p.n_threads = p.n_threads_batch = a.n_threads;
    p.flash_attn_type = flash_attn_type(a.flash_attn);
    p.type_k = cache_type("-ctk", a.type_k);
    p.type_v = cache_type("-ctv", a.type_v);
    p.no_perf = true;
    context_ptr context(llama_init_from_model(model, p), llama_free);
    if (!context) throw std::runtime_error("llama.cpp could not create a context, see its log above");
    return context;
}

// One llama_decode of ids at positions pos0...; asks for the logits of the last one only if wanted. Returns its time.
static int64_t decode(llama_context * context, const llama_token * ids, int n_ids, int pos0, bool want_logits) {
    llama_batch batch = llama_batch_init(n_ids, 0, 1);
    batch.n_tokens = n_ids;
    for (int i = 0; i < n_ids; ++i) {
        batch.token[i] = ids[i];
        batch.pos[i] = pos0 + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = want_logits && i == n_ids - 1;
    }
    const int64_t start = now_ns();
    const int rc = llama_decode(context, batch);
    llama_synchronize(context);
    const int64_t elapsed = now_ns() - start;
    llama_batch_free(batch);
    if (rc != 0) throw std::runtime_error("llama_decode returned " + std::to_string(rc) + " at position " + std::to_string(pos0));
    return elapsed;
}

// As llama.cpp's tools do before they time anything: one empty step, after which every state is cleared again.
static void warm_up(llama_context * context) {
    const llama_token id = 0;
    llama_set_warmup(context, true);
    decode(context, &id, 1, 0, true);
    llama_set_warmup(context, false);
    llama_memory_clear(llama_get_memory(context), true);
}

struct Choice { llama_token id; float gap; int n_non_finite; };

// The largest logit, the lowest id on a tie, and its distance to the second largest.
static Choice choose(const float * logits, int n_vocab) {
    Choice c{0, 0.0f, 0};
    float best = -INFINITY, second = -INFINITY;
    for (int i = 0; i < n_vocab; ++i) {
        const float x = logits[i];
        if (!std::isfinite(x)) { ++c.n_non_finite; continue; }
        if (x > best) { second = best; best = x; c.id = i; }
        else if (x > second) second = x;
    }
    c.gap = best - second;
    return c;
}

static int64_t prefill(llama_context * context, const Args & a, const ids_t & prompt) {
    const int n = int(prompt.size()), step = a.prefill == "single" ? 1 : int(llama_n_batch(context));
    int64_t total_ns = 0;
    for (int i = 0; i < n; i += step) {
        const int n_ids = std::min(step, n - i);
        total_ns += decode(context, prompt.data() + i, n_ids, i, i + n_ids == n);
    }
    return total_ns;
}

static void check_request(const Args & a, const ids_t & prompt, const ids_t & forced, int n_vocab, int n_ctx) {
    if (prompt.empty()) throw std::runtime_error(a.prompt_ids + " holds no id");
    if (a.n_predict < 1) throw std::runtime_error("-n must be at least 1");
    if (!a.force_ids.empty() && int(forced.size()) < a.n_predict - 1) throw std::runtime_error(a.force_ids + " holds fewer than n - 1 ids");
    for (const ids_t * ids : {&prompt, &forced}) for (llama_token id : *ids)
        if (id < 0 || id >= n_vocab) throw std::runtime_error("id " + std::to_string(id) + " is outside 0.." + std::to_string(n_vocab - 1));
    if (int(prompt.size()) + a.n_predict - 1 > n_ctx) throw std::runtime_error("prompt and generated ids need more than the " + std::to_string(n_ctx) + " cells of this context");
}

static json generate(llama_context * context, const Args & a, int n_vocab) {
    const ids_t prompt = read_ids(a.prompt_ids), forced = a.force_ids.empty() ? ids_t{} : read_ids(a.force_ids);
    check_request(a, prompt, forced, n_vocab, int(llama_n_ctx(context)));
    std::ofstream rows;
    if (!a.logits_out.empty()) rows.open(a.logits_out, std::ios::binary);
    if (a.warmup) warm_up(context);
    const int64_t start = now_ns();
    const int64_t prefill_ns = prefill(context, a, prompt);
    ids_t ids;
    std::vector<float> gaps;
    std::vector<int64_t> decode_ns;
    int n_non_finite = 0;
    int64_t first_token_ns = 0;
    for (int i = 0;; ++i) {
        const float * logits = llama_get_logits_ith(context, -1);
        if (rows.is_open()) rows.write(reinterpret_cast<const char *>(logits), std::streamsize(n_vocab) * 4);
        const Choice c = choose(logits, n_vocab);
        ids.push_back(c.id);
        gaps.push_back(c.gap);
        n_non_finite += c.n_non_finite;
        if (i == 0) first_token_ns = now_ns() - start;
        if (i + 1 == a.n_predict) break;
        const llama_token next = forced.empty() ? c.id : forced[size_t(i)];
        decode_ns.push_back(decode(context, &next, 1, int(prompt.size()) + i, true));
    }
    const int64_t wall_ns = now_ns() - start;
    if (rows.is_open() && !rows.flush()) throw std::runtime_error("cannot write " + a.logits_out);
    return {{"token_ids", ids}, {"top2_gap", gaps}, {"n_non_finite", n_non_finite}, {"prefill_time_ns", prefill_ns},
        {"first_token_time_ns", first_token_ns}, {"decode_time_ns", decode_ns}, {"wall_time_ns", wall_ns}};
}

// For measurements that alternate between engines: the loaded model stays, every line "PREFILL N_PREDICT" on standard
// input is one generation from an empty state and is answered by one line of JSON. The first line out describes the
// loaded model. Ends with standard input.
static void serve(llama_context * context, Args a, int n_vocab, const json & loaded) {
    printf("%s\n", loaded.dump(-1, ' ', true, json::error_handler_t::replace).c_str());
    fflush(stdout);
    if (a.warmup) warm_up(context);
    a.warmup = false;
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        if (!(words >> a.prefill >> a.n_predict) || (a.prefill != "batched" && a.prefill != "single"))
            throw std::runtime_error("'" + line + "' is not PREFILL N_PREDICT");
        llama_memory_clear(llama_get_memory(context), true);
        printf("%s\n", generate(context, a, n_vocab).dump().c_str());
        fflush(stdout);
    }
}

// The texts come as "LENGTH\nBYTES" one after another, so that a text may hold any byte.
static json tokenize(const llama_vocab * vocab, const Args & a) {
    if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) throw std::runtime_error(a.model + " has no tokenizer");
    const std::string data = read_file(a.tokenize);
    json result = json::array();
    for (size_t at = 0; at < data.size();) {
        const size_t end = data.find('\n', at);
        if (end == std::string::npos) throw std::runtime_error(a.tokenize + ": a text without its length");
        const size_t n_bytes = size_t(to_int("--tokenize", data.substr(at, end - at)));
        if (end + 1 + n_bytes > data.size()) throw std::runtime_error(a.tokenize + ": the last text is cut short");
        ids_t ids(n_bytes + 8);
        const int n = llama_tokenize(vocab, data.data() + end + 1, int32_t(n_bytes), ids.data(), int32_t(ids.size()), a.add_special, a.parse_special);
        if (n < 0) throw std::runtime_error("llama_tokenize returned " + std::to_string(n));
        ids.resize(size_t(n));
        result.push_back(ids);
        at = end + 1 + n_bytes;
    }
    return {{"tokens", result}};
}

// ---- the run -------------------------------------------------------------------------------------------------------

static void load_backends() {
#ifdef WORKER_BACKEND_DIR // a build with loadable backends keeps them beside libllama
    if (ggml_backend_reg_count() == 0) ggml_backend_load_all_from_path(WORKER_BACKEND_DIR);
#endif
}

static json run(const Args & a) {
    load_backends();
    std::list<std::string> patterns;
    const auto override_list = overrides(a.override_tensor, patterns);
    llama_model_params p = llama_model_default_params();
    p.n_gpu_layers = a.n_gpu_layers;
    p.split_mode = split_mode(a.split_mode);
    p.use_extra_bufts = a.repack;
    p.vocab_only = !a.tokenize.empty();
    if (override_list.size() > 1) p.tensor_buft_overrides = override_list.data();
    const int64_t start = now_ns();
    model_ptr model(llama_model_load_from_file(a.model.c_str(), p), llama_model_free);
    if (!model) throw std::runtime_error("llama.cpp could not load " + a.model + ", see its log above");
    const llama_vocab * vocab = llama_model_get_vocab(model.get());
    if (p.vocab_only) return tokenize(vocab, a);
    context_ptr context = make_context(model.get(), a);
    const int64_t load_ns = now_ns() - start;
    const int n_vocab = llama_vocab_n_tokens(vocab);
    Dl_info library{};
    dladdr(reinterpret_cast<void *>(llama_backend_init), &library);
    const auto * c = context.get();
    const json loaded = {{"load_time_ns", load_ns}, {"n_vocab", n_vocab}, {"n_ctx", llama_n_ctx(c)}, {"n_batch", llama_n_batch(c)},
        {"n_ubatch", llama_n_ubatch(c)}, {"n_threads", llama_n_threads(context.get())}, {"system_info", llama_print_system_info()},
        {"libllama", library.dli_fname ? library.dli_fname : ""}, {"compiler", WORKER_COMPILER}};
    if (a.serve) {
        serve(context.get(), a, n_vocab, loaded);
        return loaded;
    }
    json result = generate(context.get(), a, n_vocab);
    result.update(loaded);
    return result;
}

int main(int argc, char ** argv) {
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGKILL); // a runner that was killed must not leave a worker behind
#endif
    try {
        const Args args = parse_args(argc, argv);
        llama_backend_init();
        const json result = run(args);
        if (!args.out.empty()) write_json(args.out, result);
        llama_backend_free();
        return EXIT_SUCCESS;
    } catch (const std::exception & e) {
        fprintf(stderr, "llama-worker: error: %s\n", e.what());
        return EXIT_FAILURE;
    }
}
