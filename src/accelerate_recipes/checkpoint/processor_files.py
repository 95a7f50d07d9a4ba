"""Files of the processor of a model that sees images, in the form of its base; see `published`."""

import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import ProcessorMixin

from accelerate_recipes.checkpoint.published import CONFIG, PROCESSORS, TEMPLATE, as_bytes, files_of_base, template_file
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models.processors import load_processor


def processor_files(name: str, processor: ProcessorMixin) -> dict[str, bytes]:
    """Return the processor files of a model that sees images, by name: those of its base, with the run's changes.

    Raises:
        ConfigError: if the files cannot say these changes.
    """
    files, now = files_of_base(name, PROCESSORS), settings_of_images(processor)
    before = settings_of_images(load_processor(name, processor.tokenizer))
    changed = {field: value for field, value in now.items() if before.get(field) != value}
    for file in files.keys() & {"preprocessor_config.json", "processor_config.json"} if changed else ():
        content = json.loads(files[file])
        nested = content if file.startswith("pre") else content.get("image_processor")
        if nested is not None:
            nested |= changed
            for bound, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
                if bound in nested:  # an older name, which transformers prefers
                    nested[bound] = now["size"][edge]
            files[file] = as_bytes(content)
    if TEMPLATE in files:
        files |= template_file(name, processor.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        for file, content in (files | files_of_base(name, [CONFIG])).items():
            (Path(folder) / file).write_bytes(content)
        if (read := settings_of_images(load_processor(folder, processor.tokenizer))) != now:
            differ = sorted(field for field in now if read.get(field) != now[field])
            raise ConfigError(
                f"the processor files of {name} cannot say how this run processes images ({', '.join(differ)} would differ "
                "in the export); leave out the arguments that change it, such as --image_max_pixels"
            )
    return files


def settings_of_images(processor: ProcessorMixin) -> dict[str, Any]:
    return json.loads(processor.image_processor.to_json_string())
