# libgemtune_cuda.so: the kernels of src/ops/*.cu, opened by the program when a run asks for a GPU. Built when nvcc is found;
# it needs no GPU to build and knows no Torch.
set(GEMTUNE_CUDA_ARCHITECTURES "90" CACHE STRING "GPU architectures to build for; a release builds 80;90;100")
find_program(GEMTUNE_NVCC nvcc HINTS "$ENV{CUDA_HOME}/bin" /usr/local/cuda/bin)
if(NOT GEMTUNE_NVCC)
  message(STATUS "no nvcc: built for CPUs only")
  return()
endif()

set(CMAKE_CUDA_COMPILER "${GEMTUNE_NVCC}")
set(CMAKE_CUDA_ARCHITECTURES "${GEMTUNE_CUDA_ARCHITECTURES}")
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

file(GLOB _kernels CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/src/ops/*.cu")
add_library(gemtune_cuda SHARED ${_kernels})
set_target_properties(gemtune_cuda PROPERTIES CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_RUNTIME_LIBRARY Shared
  CUDA_VISIBILITY_PRESET hidden LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}")
target_include_directories(gemtune_cuda PRIVATE "${CMAKE_SOURCE_DIR}/src")
target_link_libraries(gemtune_cuda PRIVATE CUDA::cublasLt)
# The runtime and cuBLASLt that torch brings serve it: they are loaded before it.
set_target_properties(gemtune_cuda PROPERTIES SKIP_BUILD_RPATH ON)
