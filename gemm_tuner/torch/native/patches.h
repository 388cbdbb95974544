/* The patches of an image that a convolution multiplies, as rows of a matrix. */

namespace {

/* How a convolution moves along one side of an image. */
struct Side {
    int64_t length, kernel, stride, padding, dilation;

    int64_t places() const {
        return (length + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
    }
};

void check_window(const Tensor &x, at::IntArrayRef kernel, at::IntArrayRef stride,
                  at::IntArrayRef padding, at::IntArrayRef dilation) {
    TORCH_CHECK(x.dim() == 4, "x has the shape ", x.sym_sizes(),
                "; it must be (count, k, height, width).");
    for (const at::IntArrayRef &one : {kernel, stride, padding, dilation}) {
        TORCH_CHECK(one.size() == 2, "give kernel, stride, padding and dilation for height and "
                                     "width each, not ",
                    one, ".");
    }
    constexpr int64_t most = INT32_MAX; // so that no sum or product of two overflows
    const auto is_within = [](int64_t one, int64_t least) { return one >= least && one <= most; };
    for (int side = 0; side < 2; side++) {
        TORCH_CHECK(is_within(kernel[side], 1) && is_within(stride[side], 1) &&
                        is_within(padding[side], 0) && is_within(dilation[side], 1),
                    "kernel ", kernel, ", stride ", stride, " and dilation ", dilation,
                    " must be positive, and padding ", padding, " not negative, all below 2^31.");
    }
}

Side side_of(int64_t length, int side, at::IntArrayRef kernel, at::IntArrayRef stride,
             at::IntArrayRef padding, at::IntArrayRef dilation) {
    const Side found{length, kernel[side], stride[side], padding[side], dilation[side]};
    TORCH_CHECK(length + 2 * found.padding > found.dilation * (found.kernel - 1),
                "a kernel of ", found.kernel, " elements with dilation ", found.dilation,
                " does not fit a side of ", length, " with padding ", found.padding, ".");
    return found;
}

/* One row (kernel of height, kernel of width, k) for each place of the kernel. Elements of x that
 * lie side by side are copied at once: those of all channels, and without dilation those of
 * neighbours too. */
Tensor patches(const Tensor &x, at::IntArrayRef kernel, at::IntArrayRef stride,
               at::IntArrayRef padding, at::IntArrayRef dilation) {
    check_window(x, kernel, stride, padding, dilation);
    const Tensor image = x.contiguous(at::MemoryFormat::ChannelsLast);
    const int64_t count = x.size(0), channels = x.size(1);
    const Side height = side_of(x.size(2), 0, kernel, stride, padding, dilation);
    const Side width = side_of(x.size(3), 1, kernel, stride, padding, dilation);
    const int64_t places = height.places() * width.places();
    int64_t elements = x.element_size();
    for (const int64_t one : {count, height.places(), width.places(), channels, height.kernel,
                              width.kernel}) {
        TORCH_CHECK(!__builtin_mul_overflow(elements, std::max<int64_t>(one, 1), &elements),
                    "the patches of x take more bytes than can be counted.");
    }
    Tensor rows(at::detail::empty_cpu(
        {count * places, height.kernel * width.kernel * channels}, x.scalar_type()));
    const int64_t pixel_bytes = channels * static_cast<int64_t>(x.element_size());
    const int64_t line_bytes = width.kernel * pixel_bytes;
    const int64_t row_bytes = height.kernel * line_bytes;
    const char *from = static_cast<const char *>(image.const_data_ptr());
    char *to = static_cast<char *>(rows.mutable_data_ptr());

    /* Copy the pixels of one line of a patch, zeros where they lie outside. */
    const auto copy_line = [&](const char *line, int64_t left, char *out) {
        if (width.dilation == 1) {
            const int64_t first = std::clamp<int64_t>(-left, 0, width.kernel);
            const int64_t last = std::clamp(width.length - left, first, width.kernel);
            std::memset(out, 0, static_cast<size_t>(first * pixel_bytes));
            if (last > first) {
                std::memcpy(out + first * pixel_bytes, line + (left + first) * pixel_bytes,
                            static_cast<size_t>((last - first) * pixel_bytes));
            }
            std::memset(out + last * pixel_bytes, 0,
                        static_cast<size_t>((width.kernel - last) * pixel_bytes));
            return;
        }
        for (int64_t pixel = 0; pixel < width.kernel; pixel++) {
            const int64_t at = left + pixel * width.dilation;
            const bool is_inside = at >= 0 && at < width.length;
            char *place = out + pixel * pixel_bytes;
            if (is_inside) {
                std::memcpy(place, line + at * pixel_bytes, static_cast<size_t>(pixel_bytes));
            } else {
                std::memset(place, 0, static_cast<size_t>(pixel_bytes));
            }
        }
    };
    constexpr int64_t bytes_of_task = 32768;
    const int64_t grain = std::max<int64_t>(1, bytes_of_task / std::max<int64_t>(1, row_bytes));
    at::parallel_for(0, count * places, grain, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const int64_t place = row % places;
            const int64_t top = place / width.places() * height.stride - height.padding;
            const int64_t left = place % width.places() * width.stride - width.padding;
            const char *own = from + row / places * height.length * width.length * pixel_bytes;
            for (int64_t line = 0; line < height.kernel; line++) {
                const int64_t at = top + line * height.dilation;
                char *out = to + row * row_bytes + line * line_bytes;
                if (at >= 0 && at < height.length) {
                    copy_line(own + at * width.length * pixel_bytes, left, out);
                } else {
                    std::memset(out, 0, static_cast<size_t>(line_bytes));
                }
            }
        }
    });
    return rows;
}

Tensor patches_meta(const Tensor &x, at::IntArrayRef kernel, at::IntArrayRef stride,
                    at::IntArrayRef padding, at::IntArrayRef dilation) {
    check_window(x, kernel, stride, padding, dilation);
    c10::SymInt rows = x.sym_size(0);
    for (int side = 0; side < 2; side++) {
        if (const auto known = x.sym_size(2 + side).maybe_as_int()) {
            side_of(*known, side, kernel, stride, padding, dilation);
        }
        const c10::SymInt length = x.sym_size(2 + side) + 2 * padding[side];
        rows = rows * ((length - dilation[side] * (kernel[side] - 1) - 1) / stride[side] + 1);
    }
    return at::empty_symint({rows, x.sym_size(1) * kernel[0] * kernel[1]}, x.options());
}

} // namespace
