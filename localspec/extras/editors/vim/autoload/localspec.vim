" The commands, the item for the status line, and what all parts share.

let s:note = ''      " what goes on
let s:error = ''     " what went wrong last, until something goes right
let s:model = ''     " the pair that answered

let s:words = ['ask', 'chat', 'edit', 'next', 'off', 'on', 'status', 'stop']

" :Localspec WORD …
function! localspec#command(ranged, first, last, words) abort
  let [word; rest] = matchlist(a:words .. ' ', '^\s*\(\S*\)\s\+\(.\{-}\)\s*$')[1:2]
  let range = a:ranged ? [a:first, a:last] : []
  if index(s:words, word) < 0
    return s:say('ErrorMsg', printf('No such command: %s; there are %s.', word, join(s:words, ', ')))
  endif
  try
    call s:{word}(range, rest[0])
  catch /^localspec: /
    call s:say('ErrorMsg', localspec#cause(v:exception))
  endtry
endfunction

function! localspec#words(lead, line, position) abort
  return filter(copy(s:words), {_, word -> stridx(word, a:lead) == 0})
endfunction

function! s:ask(range, question) abort
  let question = s:asked(a:question, 'Question: ')
  if !empty(question)
    call localspec#chat#ask(localspec#quoted(a:range), question)
  endif
endfunction

function! s:chat(range, question) abort
  call localspec#chat#open(localspec#quoted(a:range), a:question)
endfunction

function! s:edit(range, instruction) abort
  let instruction = s:asked(a:instruction, 'Instruction: ')
  if !empty(instruction)
    call localspec#edit#ask(empty(a:range) ? [line('.'), line('.')] : a:range, instruction)
  endif
endfunction

function! s:next(range, rest) abort
  let g:localspec_next_edit = 1
  call localspec#next#changed()
endfunction

function! s:on(range, rest) abort
  let g:localspec_enabled = 1
endfunction

function! s:off(range, rest) abort
  let g:localspec_enabled = 0
  call localspec#ghost#stop()
  call localspec#next#stop()
endfunction

function! s:stop(range, rest) abort
  call localspec#chat#stop()
  call localspec#edit#stop()
endfunction

function! s:status(range, rest) abort
  call localspec#socket#run(localspec#daemon#program() + ['status'], {code, out, err -> localspec#view#idle({-> s:page(split(code < 0 ? err : out .. err, "\n"))})})
endfunction

" Lines in a window of their own: from the editor's loop only one row can be said.
function! s:page(lines) abort
  if len(a:lines) < 2
    return localspec#say(join(a:lines))
  endif
  execute get(g:, 'localspec_split', 'botright') len(a:lines) .. 'new'
  setlocal buftype=nofile bufhidden=wipe noswapfile nobuflisted nowrap winfixheight statusline=\ localspec\ status:\ q\ closes
  call setline(1, a:lines)
  setlocal nomodifiable
  nnoremap <buffer> <silent> q <Cmd>close<CR>
endfunction

" The words of a command, or what is typed when there are none.
function! s:asked(words, prompt) abort
  return empty(a:words) ? trim(input(a:prompt)) : a:words
endfunction

" Lines as a part of a question: their file's name, and the lines in a fence. '' without lines.
function! localspec#quoted(range) abort
  if empty(a:range)
    return ''
  endif
  let name = empty(expand('%')) ? 'Text' : expand('%:t')
  return printf("%s, lines %d to %d:\n%s", name, a:range[0], a:range[1], localspec#fenced(getline(a:range[0], a:range[1])))
endfunction

" Lines between fences that are longer than any in them.
function! localspec#fenced(lines) abort
  let fence = '```'
  while match(a:lines, '^\s*' .. fence) >= 0
    let fence ..= '`'
  endwhile
  return fence .. &filetype .. "\n" .. join(a:lines, "\n") .. "\n" .. fence
endfunction

" The fields that name the pair, where one was set.
function! localspec#model() abort
  return empty(get(g:, 'localspec_model', '')) ? {} : {'model': g:localspec_model}
endfunction

" For 'statusline': what localspec is doing, or did last.
function! localspec#statusline() abort
  if !get(g:, 'localspec_enabled', 1)
    return 'localspec off'
  elseif localspec#daemon#starting()
    return 'localspec starts'
  endif
  return join(filter(['localspec', s:model, empty(s:error) ? s:note : '!'], {_, word -> !empty(word)}))
endfunction

" What went wrong last: for :Localspec status and for whoever looks; '' where nothing did.
function! localspec#error() abort
  return s:error
endfunction

" What goes on now.
function! localspec#note(note) abort
  let s:note = a:note
  redrawstatus
endfunction

" Something went wrong on its own, while somebody types: the status line says so and nothing else does.
function! localspec#failed(error) abort
  let s:error = a:error
  call localspec#note('')
endfunction

" An answer has come: of which pair.
function! localspec#named(event) abort
  let s:error = ''
  let model = get(a:event, 'model', '')
  if type(model) == v:t_string && !empty(model)
    let s:model = model
  endif
endfunction

" Call it; what goes wrong is noted and disturbs nobody.
function! localspec#guarded(function, ...) abort
  try
    call call(a:function, a:000)
  catch
    call localspec#failed(localspec#cause(v:exception))
  endtry
endfunction

" An exception as a sentence.
function! localspec#cause(exception) abort
  return substitute(a:exception, '^localspec: \|^Vim\%((\a\+)\)\=:', '', '')
endfunction

function! localspec#typed() abort
  call localspec#guarded('localspec#next#typed')
  call localspec#guarded('localspec#ghost#typed')
endfunction

function! localspec#stop() abort
  call localspec#guarded('localspec#ghost#stop')
  call localspec#guarded('localspec#next#stop')
endfunction

function! localspec#changed() abort
  call localspec#guarded('localspec#next#changed')
endfunction

function! localspec#noted(anew) abort
  call localspec#guarded('localspec#next#note', a:anew)
endfunction

function! localspec#left() abort
  call localspec#guarded('localspec#context#left')
  call localspec#guarded('localspec#ghost#rest')
endfunction

function! localspec#rests() abort
  call localspec#guarded('localspec#context#rests')
endfunction

" Say something to the person, in `group`'s colours.
function! s:say(group, text) abort
  execute 'echohl' a:group
  for line in split(a:text, "\n")
    echomsg line
  endfor
  echohl None
endfunction

" The same from the editor's loop: in one row, for more would wait for a key that is somebody's text.
function! localspec#say(text) abort
  let row = strtrans(tr('localspec: ' .. a:text, "\n", ' '))
  if strdisplaywidth(row) > v:echospace
    while strdisplaywidth(row) >= v:echospace && !empty(row)
      let row = strcharpart(row, 0, min([strchars(row) - 1, v:echospace]))
    endwhile
    let row ..= '…'
  endif
  call s:say('None', row)
endfunction
