/* Weights that were made constants when a model was compiled: whether they have changed since. */

namespace {

/* A weight as it was. Its data are not kept, only what tells that they changed: the number of writes
 * in place, and the storage, which a tensor that is gone has no more. No storage is looked into, so
 * that it may go meanwhile. */
struct KnownWeight {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    c10::VariableVersion version;
    const c10::StorageImpl *storage;
    uint32_t writes;
};

const c10::StorageImpl *storage_of(const c10::TensorImpl &tensor) {
    return tensor.unsafe_storage().unsafeGetStorageImpl();
}

/* Weights of inference mode count none. */
uint32_t writes_of(const c10::VariableVersion &version) {
    return version.enabled() ? version.current_version() : 0;
}

bool is_changed(const KnownWeight &known) {
    const c10::StorageImpl *storage = storage_of(*known.tensor._unsafe_get_target());
    return writes_of(known.version) != known.writes || (storage && storage != known.storage);
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
        known->push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(tensor), version,
                          storage_of(*tensor), writes_of(version)});
    }
    return known.release();
}

/* Let weights be changed that were written where PyTorch does not count it. */
extern "C" __attribute__((visibility("default"))) void
gemm_tuner_note_written(std::vector<KnownWeight> *known, c10::TensorImpl *const *written,
                        int64_t count) {
    const std::unordered_set<const c10::TensorImpl *> all(written, written + count);
    for (KnownWeight &one : *known) {
        if (all.count(one.tensor._unsafe_get_target())) {
            one.writes = ~writes_of(one.version);
        }
    }
}

/* The place of the first that was written in place or moved, -1 if none was. */
extern "C" __attribute__((visibility("default"))) int64_t
gemm_tuner_changed_weight(const std::vector<KnownWeight> *known) {
    const auto found = std::find_if(known->begin(), known->end(), is_changed);
    return found == known->end() ? -1 : found - known->begin();
}

extern "C" __attribute__((visibility("default"))) void
gemm_tuner_forget_weights(std::vector<KnownWeight> *known) {
    delete known;
}
