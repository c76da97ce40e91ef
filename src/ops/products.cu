// Matrix products through cuBLASLt, whose epilogues add a bias and a residual without another pass.
#include "ops/device.cuh"

#include <cublasLt.h>

#include <array>
#include <map>
#include <mutex>

namespace gemtune {
namespace {

constexpr size_t kWorkspaceBytes = size_t{64} << 20;

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) throw std::runtime_error(std::string(what) + ": " + cublasLtGetStatusString(status));
}

// Everything that the choice of an algorithm depends on.
using Key = std::array<int64_t, 14>;

struct Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr, d = nullptr;
  cublasLtMatmulAlgo_t algorithm = {};
};

// One a device: handle, workspace and the plans made so far. Kept for the life of the process.
class Products {
 public:
  Products() {
    check(cublasLtCreate(&handle_), "cublasLtCreate");
    gemtune::check(cudaMalloc(&workspace_, kWorkspaceBytes), "cudaMalloc of the products' workspace");
    const float constants[2] = {0.0f, 1.0f};
    gemtune::check(cudaMalloc(&constants_, sizeof(constants)), "cudaMalloc");
    gemtune::check(cudaMemcpy(constants_, constants, sizeof(constants), cudaMemcpyHostToDevice), "cudaMemcpy");
  }

  void run(const MatrixProduct& p, cudaStream_t stream) {
    const Plan& plan = plan_for(p);
    if (p.bias != nullptr) {
      check(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p.bias, sizeof(p.bias)), "bias");
    }
    const float beta = p.c != nullptr ? 1.0f : 0.0f;
    const void* alpha_at = p.device_alpha != nullptr ? static_cast<const void*>(p.device_alpha) : &p.alpha;
    const void* beta_at = p.device_alpha != nullptr ? static_cast<const void*>(constants_ + (p.c != nullptr ? 1 : 0)) : &beta;
    const void* c = p.c != nullptr ? p.c : p.d;
    check(cublasLtMatmul(handle_, plan.operation, alpha_at, p.b, plan.a, p.a, plan.b, beta_at, c, plan.c, p.d, plan.d,
                         &plan.algorithm, workspace_, kWorkspaceBytes, stream),
          "cublasLtMatmul");
  }

 private:
  // cuBLAS is column-major: it computes dᵀ = op(b)ᵀ op(a)ᵀ, whose matrices are ours as they lie.
  const Plan& plan_for(const MatrixProduct& p) {
    const int64_t c_stride = p.c != nullptr ? p.c_stride : p.d_stride;
    const Key key = {p.m,
                     p.n,
                     p.k,
                     p.a_stride,
                     p.b_stride,
                     c_stride,
                     p.d_stride,
                     p.a_transposed,
                     p.b_transposed,
                     p.fp32_out,
                     p.c != nullptr,
                     p.bias != nullptr,
                     p.device_alpha != nullptr,
                     p.c == p.d};
    const auto found = plans_.find(key);
    if (found != plans_.end()) return found->second;

    Plan plan;
    check(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
      check(cublasLtMatmulDescSetAttribute(plan.operation, attribute, &value, sizeof(value)), "cublasLtMatmulDescSetAttribute");
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (p.device_alpha != nullptr) set(CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_DEVICE);
    if (p.bias != nullptr) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_16BF);
    }
    const cudaDataType_t out = p.fp32_out ? CUDA_R_32F : CUDA_R_16BF;
    const auto layout = [&](cublasLtMatrixLayout_t* to, cudaDataType_t type, int64_t rows, int64_t columns, int64_t stride) {
      check(cublasLtMatrixLayoutCreate(to, type, uint64_t(rows), uint64_t(columns), stride), "cublasLtMatrixLayoutCreate");
    };
    // b is [k, n] row-major = [n, k] column-major; stored transposed it is [k, n] column-major.
    layout(&plan.a, CUDA_R_16BF, p.b_transposed ? p.k : p.n, p.b_transposed ? p.n : p.k, p.b_stride);
    layout(&plan.b, CUDA_R_16BF, p.a_transposed ? p.m : p.k, p.a_transposed ? p.k : p.m, p.a_stride);
    layout(&plan.c, out, p.n, p.m, c_stride);
    layout(&plan.d, out, p.n, p.m, p.d_stride);

    cublasLtMatmulPreference_t preference = nullptr;
    check(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    const size_t workspace = kWorkspaceBytes;
    check(
        cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace)),
        "workspace");
    cublasLtMatmulHeuristicResult_t result = {};
    int count = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle_, plan.operation, plan.a, plan.b, plan.c, plan.d, preference, 1, &result, &count);
    cublasLtMatmulPreferenceDestroy(preference);
    if (status != CUBLAS_STATUS_SUCCESS || count == 0) {
      throw std::runtime_error("cuBLASLt has no algorithm for a product of " + std::to_string(p.m) + " × " + std::to_string(p.k) +
                               " × " + std::to_string(p.n));
    }
    plan.algorithm = result.algo;
    return plans_.emplace(key, plan).first->second;
  }

  cublasLtHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  float* constants_ = nullptr;  // 0, 1
  std::map<Key, Plan> plans_;
};

}  // namespace

void Kernels::matrix_product(const MatrixProduct& product, void* stream) const {
  // The backward pass runs on a thread of its own.
  static std::mutex mutex;
  static std::map<int, Products*> products;
  const std::lock_guard lock(mutex);
  int device = 0;
  gemtune::check(cudaGetDevice(&device), "cudaGetDevice");
  Products*& here = products[device];
  if (here == nullptr) here = new Products;
  here->run(product, as_stream(stream));
}

}  // namespace gemtune
