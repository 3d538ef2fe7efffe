#!/usr/bin/env bash
# Environments with the peers, and the demo model in their formats, under build/peers.
# The exporter of OpenVINO models needs other versions than the runtime, hence two environments.
set -euo pipefail
cd "$(dirname "$0")/.."
checkpoint=build/checkpoints/smollm2-135m
peers=build/peers
quiet=(--quiet --disable-pip-version-check)

if [ ! -e "$peers/venv/.done" ]; then
    python3 -m venv "$peers/venv"
    "$peers/venv/bin/pip" install "${quiet[@]}" torch==2.13.0 numpy==1.26.4 transformers==5.24.0 accelerate \
        onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx==1.23.2 onnx_ir \
        openvino==2026.4.0 openvino-genai==2026.4.0
    touch "$peers/venv/.done"
fi
if [ ! -e "$peers/export/.done" ]; then
    python3 -m venv "$peers/export"
    "$peers/export/bin/pip" install "${quiet[@]}" torch==2.13.0 "optimum-intel==2.2.0" openvino==2026.4.0 \
        openvino-tokenizers==2026.4.0 nncf==3.4.0
    # torchvision comes along as a dependency and does not import beside this torch.
    "$peers/export/bin/pip" uninstall "${quiet[@]}" --yes torchvision
    touch "$peers/export/.done"
fi
for precision in fp32 int8; do
    if [ ! -e "$peers/genai-$precision/genai_config.json" ]; then
        "$peers/venv/bin/python" -m onnxruntime_genai.models.builder -m demo -i "$checkpoint" \
            -o "$peers/genai-$precision" -p "$precision" -e cpu -c "$peers/cache" \
            --extra_options int4_accuracy_level=4
    fi
    if [ ! -e "$peers/openvino-$precision/openvino_model.xml" ]; then
        "$peers/export/bin/optimum-cli" export openvino -m "$checkpoint" \
            --task text-generation-with-past --weight-format "$precision" "$peers/openvino-$precision"
    fi
done
