/* Weights that were made constants when a model was compiled: whether they have changed since. */

namespace {

/* A weight as it was. Its data are not kept, only what tells that they changed: the number of writes
 * in place, and which elements of which storage it has. A tensor that is gone has no storage any
 * more. A storage whose data are gone keeps its address, so that no other is taken for it. */
struct KnownWeight {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    c10::VariableVersion version;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    uint32_t writes;
    int64_t offset;
    c10::impl::SizesAndStrides shape;
};

const c10::StorageImpl *storage_of(const c10::TensorImpl &tensor) {
    return tensor.unsafe_storage().unsafeGetStorageImpl();
}

/* Weights of inference mode count none. */
uint32_t writes_of(const c10::VariableVersion &version) {
    return version.enabled() ? version.current_version() : 0;
}

/* Whether a tensor has other elements, of the storage that it had or of another. */
bool is_elsewhere(const c10::TensorImpl &tensor, const KnownWeight &known) {
    return storage_of(tensor) != known.storage._unsafe_get_target() ||
           tensor.storage_offset() != known.offset ||
           tensor.strides() != known.shape.strides_arrayref() ||
           tensor.sizes() != known.shape.sizes_arrayref();
}

bool is_changed(const KnownWeight &known) {
    const c10::TensorImpl &tensor = *known.tensor._unsafe_get_target();
    return writes_of(known.version) != known.writes ||
           (storage_of(tensor) && is_elsewhere(tensor, known));
}

} // namespace

/* For ctypes, under the lock of Python: remember tensors as they are now, until
 * gemm_tuner_forget_weights. */
extern "C" __attribute__((visibility("default"))) void *
gemm_tuner_know_weights(c10::TensorImpl *const *tensors, int64_t count) {
    auto known = std::make_unique<std::vector<KnownWeight>>();
    known->reserve(static_cast<size_t>(count));
    for (int64_t place = 0; place < count; place++) {
        const auto tensor = c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(tensors[place]);
        const c10::VariableVersion &version = tensor->version_counter();
        c10::impl::SizesAndStrides shape;
        shape.set_sizes(tensor->sizes());
        shape.set_strides(tensor->strides());
        known->push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(tensor), version,
                          tensor->storage().getWeakStorageImpl(), writes_of(version),
                          tensor->storage_offset(), std::move(shape)});
    }
    return known.release();
}

/* Let weights be changed that lie where tensors do, in which PyTorch wrote without counting it. */
extern "C" __attribute__((visibility("default"))) void
gemm_tuner_note_written(std::vector<KnownWeight> *known, c10::TensorImpl *const *written,
                        int64_t count) {
    std::unordered_set<const c10::StorageImpl *> storages;
    for (int64_t place = 0; place < count; place++) {
        storages.insert(storage_of(*written[place]));
    }
    storages.erase(nullptr);
    for (KnownWeight &one : *known) {
        if (storages.count(one.storage._unsafe_get_target())) {
            one.writes = ~writes_of(one.version);
        }
    }
}

/* The place of the first, from a place on, that was written in place or moved, -1 if none was. */
extern "C" __attribute__((visibility("default"))) int64_t
gemm_tuner_changed_weight(const std::vector<KnownWeight> *known, int64_t from) {
    const auto found = std::find_if(known->begin() + from, known->end(), is_changed);
    return found == known->end() ? -1 : found - known->begin();
}

extern "C" __attribute__((visibility("default"))) void
gemm_tuner_forget_weights(std::vector<KnownWeight> *known) {
    delete known;
}
