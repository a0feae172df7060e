# Everything that is measured in README.md and docs; needs the extra `bench`, Chromium and a quiet machine.
RESULTS = benchmarks/results
LADDER = n8c64h56w56k64r3s3p1_f32_forward+bias+relu

.PHONY: figures measurements pictures docs

figures: measurements pictures

measurements:
	tilewise bench model vgg16 --batch 8 --rounds 5 --against torch,openvino,onnxruntime,ncnn,mnn -o $(RESULTS)/vgg16.json
	tilewise bench suite vgg --batch 8 -o $(RESULTS)/vgg_layers.json
	tilewise ladder $(LADDER) -o $(RESULTS)/ladder.json

# from the result files alone
pictures:
	python scripts/write_tables.py
	python scripts/diagrams.py docs/images
	tilewise report $(RESULTS)/vgg16.json $(RESULTS)/vgg_layers.json $(RESULTS)/ladder.json \
		-o build/report.html --png docs/images
	python scripts/screenshot.py build/report.html docs/images/report

docs:
	mkdocs build --strict
