"""Clients of embeddings and reranking as their documents use them.

`embedding_clients.py EMBEDDING_URL RERANKING_URL`: prints a line of JSON for each client, its name and the vectors of
TEXTS, or the places of TEXTS from the best to the worst.
"""

import json
import sys

import cohere
from huggingface_hub import InferenceClient
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from openai import OpenAI

TEXTS = ["The wolf", "A little girl", "The grandmother was ill in bed"]
embedding, reranking = sys.argv[1:]


def report(client: str, found: object) -> None:
    print(json.dumps({"client": client, "found": found}), flush=True)


given = {"api_key": "none", "model": "encoder"}
answer = OpenAI(base_url=f"{embedding}/v1", api_key="none").embeddings.create(model="encoder", input=TEXTS)
report("openai", [each.embedding for each in answer.data])
langchain = OpenAIEmbeddings(base_url=f"{embedding}/v1", check_embedding_ctx_length=False, **given)
report("langchain-openai", langchain.embed_documents(TEXTS))
report(
    "huggingface_hub", [InferenceClient(f"{embedding}/embed").feature_extraction(text)[0].tolist() for text in TEXTS]
)
tei = TextEmbeddingsInference(model_name="encoder", base_url=embedding)
report("llama-index, TEI", tei.get_text_embedding_batch(TEXTS))
like = OpenAILikeEmbedding(model_name="encoder", api_base=f"{embedding}/v1", api_key="none")
report("llama-index, OpenAI", like.get_text_embedding_batch(TEXTS))
ranked = cohere.ClientV2(api_key="none", base_url=reranking).rerank(model="reranker", query="Who?", documents=TEXTS)
report("cohere", [each.index for each in ranked.results])
