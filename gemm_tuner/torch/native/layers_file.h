/* Layers from a folder: layers.txt says what they are, and the kernels lie beside it.
 * gemm_tuner/torch/inductor/exporting.py writes it; one line is one layer or one kernel of the layer above.
 *
 *   gemm-tuner layers 3
 *   layer NUMBER N K PACKED_BYTES GROUP TYPE W STEPS       n: a number, or a range, 1..64;
 *                                                          steps: numbers joined by commas, or -
 *   kernel FILE M_LOW M_HIGH PACKED_OFFSET IS_PACKER THREADS FEATURES PROBLEM
 *                                                          features: x86_64, or names of
 *                                                          /proc/cpuinfo joined by commas
 */
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <set>
#include <sstream>

namespace gemm_tuner_layers {

constexpr const char *file_name = "layers.txt";
constexpr const char *first_line = "gemm-tuner layers 3";

using Add = void (*)(const LayerFacts &, const KernelEntry *, int64_t);

inline std::set<std::string> features_of_cpu() {
    std::ifstream cpuinfo("/proc/cpuinfo");
    for (std::string line; std::getline(cpuinfo, line);) {
        if (line.rfind("flags", 0) == 0) {
            std::istringstream words(line.substr(line.find(':') + 1));
            return {std::istream_iterator<std::string>(words), {}};
        }
    }
    return {};
}

/* AMX needs a permission for the process: Linux, arch/x86/include/uapi/asm/prctl.h. */
inline bool may_use_amx() {
    constexpr long request = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

inline void check_features(const std::string &kernel, const std::string &required) {
    static const std::set<std::string> usable = features_of_cpu();
    std::istringstream names(required);
    for (std::string name; std::getline(names, name, ',');) {
        TORCH_CHECK(name == "x86_64" || usable.count(name), "kernel ", kernel, " needs ", name,
                    ", which this CPU does not have; compile the model on a machine like this.");
        TORCH_CHECK(name != "amx_tile" || may_use_amx(), "kernel ", kernel,
                    " needs AMX, which Linux does not permit here: ", std::strerror(errno), ".");
    }
}

template <typename Function> void find(void *library, const char *name, Function *&function) {
    function = reinterpret_cast<Function *>(dlsym(library, name));
    TORCH_CHECK(function, "a kernel has no function ", name, "; export it again.");
}

/* A library is never closed: kernels stay for as long as the process. */
inline void open_kernel(const std::string &path, const LayerFacts &layer, KernelEntry &kernel) {
    void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(library, "a kernel cannot be loaded: ", dlerror());
    decltype(&gemm_tuner_abi_version) version;
    decltype(&gemm_tuner_phases) phases;
    decltype(&gemm_tuner_preferred_parts) parts;
    decltype(&gemm_tuner_packed_weight_bytes) packed_bytes;
    decltype(&gemm_tuner_describe) describe;
    find(library, "gemm_tuner_abi_version", version);
    TORCH_CHECK(version() >= GEMM_TUNER_LEAST_ABI_VERSION && version() <= GEMM_TUNER_ABI_VERSION,
                path, " has version ", version(),
                " of the kernels' interface, and this library calls versions ",
                GEMM_TUNER_LEAST_ABI_VERSION, " to ", GEMM_TUNER_ABI_VERSION,
                "; export both again.");
    if (version() >= 3) {
        find(library, "gemm_tuner_pack_weights_part", kernel.pack_part);
    }
    find(library, "gemm_tuner_phases", phases);
    find(library, "gemm_tuner_preferred_parts", parts);
    find(library, "gemm_tuner_run", kernel.run);
    find(library, "gemm_tuner_pack_weights", kernel.pack);
    find(library, "gemm_tuner_workspace_bytes", kernel.workspace_bytes);
    find(library, "gemm_tuner_packed_weight_bytes", packed_bytes);
    find(library, "gemm_tuner_describe", describe);
    const std::string least = layer.n_low < layer.n ? std::to_string(layer.n_low) + ".." : "";
    const std::string sizes =
        "x" + least + std::to_string(layer.n) + "x" + std::to_string(layer.k) + " ";
    const std::string described = describe();
    const auto says = [&](const std::string &words) {
        return described.find(words) != std::string::npos;
    };
    const std::string group = layer.group == layer.k ? "k" : std::to_string(layer.group);
    const auto w = static_cast<Weights>(layer.w);
    TORCH_CHECK(says(sizes) && says("\"matmul ") == (w == Weights::nk || w == Weights::kn) &&
                    says("\"attention ") == (w == Weights::keys) &&
                    (!layer.group || says(":g" + group + " ")) &&
                    says("_u4_") == type_table[layer.type].has_4_bits() &&
                    packed_bytes() <= static_cast<uint64_t>(layer.packed_bytes) &&
                    static_cast<uint64_t>(kernel.packed_offset) <=
                        static_cast<uint64_t>(layer.packed_bytes) - packed_bytes(),
                path, " is not of the layer that it is listed for; export the kernels again.");
    kernel.phases = phases();
    kernel.parts = parts();
}

/* Whether each step that reads an operand is there at most once. */
inline bool has_operands_once(const LayerFacts &layer) {
    return std::all_of(layer.steps, layer.steps + layer.step_count, [&](int32_t step) {
        return !reads_operand(static_cast<Step>(step)) ||
               std::count(layer.steps, layer.steps + layer.step_count, step) == 1;
    });
}

/* Reads `64`, or `1..64`. */
inline bool read_range(const std::string &text, int64_t &low, int64_t &high) {
    const size_t dots = text.find("..");
    std::istringstream first(text), last(dots == std::string::npos ? text : text.substr(dots + 2));
    return (first >> low) && (last >> high) && last.eof() && 0 <= low && low <= high;
}

struct Reading {
    std::string folder;
    Add add;
    LayerFacts layer = {};
    std::vector<KernelEntry> kernels;
    std::vector<std::unique_ptr<std::string>> names;

    void finish_layer() {
        if (!kernels.empty()) {
            add(layer, kernels.data(), static_cast<int64_t>(kernels.size()));
        }
        layer = {};
        kernels.clear();
        names.clear();
    }

    bool read_layer(std::istream &words) {
        finish_layer();
        std::string columns, steps;
        words >> layer.number >> columns >> layer.k >> layer.packed_bytes >> layer.group >>
            layer.type >> layer.w >> steps;
        std::istringstream numbers(steps == "-" ? "" : steps);
        for (std::string text; std::getline(numbers, text, ',');) {
            std::istringstream number(text);
            int32_t step = -1;
            if (layer.step_count == max_steps || !(number >> step) || !number.eof() || step < 0 ||
                step >= step_kinds) {
                return false;
            }
            layer.steps[layer.step_count++] = step;
        }
        return words && read_range(columns, layer.n_low, layer.n) && layer.n > 0 &&
               layer.k > 0 && layer.packed_bytes >= 0 && has_operands_once(layer) &&
               layer.type >= 0 && layer.type < type_kinds && layer.w >= 0 &&
               layer.w < weights_kinds && 0 <= layer.group && layer.group <= layer.k &&
               type_table[layer.type].is_weight_only() == (layer.group > 0);
    }

    bool read_kernel(std::istream &words) {
        KernelEntry kernel = {};
        std::string file, features, problem;
        words >> file >> kernel.m_low >> kernel.m_high >> kernel.packed_offset >>
            kernel.is_packer >> kernel.threads >> features >> std::ws;
        if (!words || !std::getline(words, problem) || !layer.number ||
            file.find('/') != std::string::npos || kernel.packed_offset < 0 ||
            kernel.packed_offset % GEMM_TUNER_ALIGNMENT || kernel.m_low > kernel.m_high) {
            return false;
        }
        check_features(file, features);
        open_kernel(folder + "/" + file, layer, kernel);
        names.push_back(std::make_unique<std::string>(problem));
        kernel.name = names.back()->c_str();
        kernels.push_back(kernel);
        return true;
    }
};

inline void read(const std::string &folder, Add add) {
    const std::string path = folder + "/" + file_name;
    std::ifstream lines(path);
    TORCH_CHECK(lines, path, " cannot be read: ", std::strerror(errno), ".");
    Reading reading{folder, add};
    std::string line;
    bool is_right = std::getline(lines, line) && line == first_line;
    int64_t number = 1;
    while (is_right && std::getline(lines, line)) {
        number++;
        std::istringstream words(line);
        std::string kind;
        words >> kind;
        is_right = kind == "layer"    ? reading.read_layer(words)
                   : kind == "kernel" ? reading.read_kernel(words)
                                      : false;
    }
    TORCH_CHECK(is_right, path, ", line ", number,
                ": this is not what this version of gemm-tuner writes; export the kernels again.");
    reading.finish_layer();
}

/* The folder of this library, found when it is loaded: a relative path is of that moment. */
inline std::string own_folder() {
    Dl_info here = {};
    if (!dladdr(reinterpret_cast<void *>(&own_folder), &here) || !here.dli_fname) {
        return ".";
    }
    const std::unique_ptr<char, decltype(&std::free)> path(realpath(here.dli_fname, nullptr),
                                                           std::free);
    const std::string whole = path ? path.get() : here.dli_fname;
    return whole.substr(0, whole.rfind('/'));
}
inline const std::string folder_of_library = own_folder();

/* Read the folder that this library lies in, if it has a layers.txt. */
inline void read_beside(Add add) {
    if (access((folder_of_library + "/" + file_name).c_str(), F_OK) == 0) {
        read(folder_of_library, add);
    }
}

} // namespace gemm_tuner_layers
